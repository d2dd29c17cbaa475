"""How long the training stands still for an asynchronous save, beside a synchronous one, in turns.

A model of more than 300 M parameters trains on random tokens. Each round trains the same number of steps three times:
with a synchronous save at their beginning, with an asynchronous one, and with none. After an asynchronous save it
trains on until the thread has written. Extra wall time is that of the save and its steps, less as many steps alone.
Prints one JSON object, and writes it to benchmarks/results/checkpoint_async.json: medians over rounds.

    python benchmarks/checkpoint_async.py                       two processes on two cores, then one with a core free
    python benchmarks/checkpoint_async.py --small --rounds 1    a small model, to see that it works
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results" / "checkpoint_async.json"
LARGE = ("model.dim=1024", "model.layers=16", "model.heads=16", "model.kv_heads=16", "model.ffn_dim=4096")
SMALL = ("model.dim=128", "model.layers=2", "model.ffn_dim=512")
RECIPE = (
    *(
        "data=synthetic",
        "data.vocab_size=32000",
        "model.vocab_size=32000",
        "training.seq_len=16",
        "training.steps=1000",
    ),
    *("training.validate_every=0", "optimizer.schedule.warmup_steps=0", "cluster.accelerator=cpu"),
)
GB = 1e9


def main() -> None:
    """Measure both settings, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="of each of the three parts of a round")
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 1])
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--folder", help="on the disk to measure (default: for temporary files)")
    parser.add_argument("--into", type=Path, default=RESULT)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        _rank(given, Path(given.rank))
        return
    measured = {f"{processes}_processes": _measure(given, processes) for processes in given.processes}
    result = {
        "date": datetime.now(tz=UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}",
        "niceness": os.nice(0),
        **measured,
    }
    text = json.dumps(result, indent=2) + "\n"
    if not given.small:
        given.into.write_text(text)
    print(text, end="")


def _measure(given: argparse.Namespace, processes: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, *sys.argv[1:], "--rank", folder, "--processes", str(processes)],
                env={
                    **os.environ,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(processes),
                    "LOCAL_WORLD_SIZE": str(processes),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "OMP_NUM_THREADS": "1",
                },
            )
            for rank in range(processes)
        ]
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            raise SystemExit(f"ranks ended with {codes}")
        found: dict[str, Any] = json.loads((Path(folder) / "result.json").read_text())
        return found


def _rank(given: argparse.Namespace, folder: Path) -> None:
    import torch

    from titanlab.checkpoint import Position, Target
    from titanlab.checkpoint.saving import SyncSaver
    from titanlab.cli.compose import compose
    from titanlab.data import source
    from titanlab.distributed import build_mesh, joined, open_world
    from titanlab.recipe import resolve
    from titanlab.train.assemble import assemble

    ranks = joined(os.environ)
    assert ranks is not None
    layout = ["parallelism=fsdp"] if ranks.world > 1 else []
    overrides = [*RECIPE, *(SMALL if given.small else LARGE), *layout, f"training.global_batch={ranks.world}"]
    (composed,) = compose(overrides)
    recipe = resolve(composed, world=ranks.world, accelerator="cpu", device="cpu")
    with open_world(ranks, accelerator="cpu", seed=0, deterministic=False) as world:
        mesh = build_mesh(recipe.layout, "cpu")
        assembled = assemble(recipe, world, mesh)
        optimizer = recipe.optimizer.implementation().build(dict(assembled.model.named_parameters()))
        stream = source.open_train(
            recipe.data,
            seed=0,
            seq_len=recipe.training.seq_len,
            global_batch=recipe.training.global_batch,
            rank=mesh.data_rank,
            ranks=recipe.layout.data,
            state=None,
        )
        target = Target(folder=folder / "checkpoints", model=assembled.model, optimizer=optimizer, world=world, keep=1)
        background, sync = _measured_saver()(target), SyncSaver(target)
        number = 0

        def step() -> None:
            assembled.forward_backward(assembled.to_device(stream.next_batch()))
            background.before_update()
            assembled.loss_scale.step(optimizer)
            assembled.after_update()
            optimizer.zero_grad()

        def is_writing() -> bool:
            """Whether the thread of any rank writes."""
            own = background._thread is not None and background._thread.is_alive()
            return float(world.sum(torch.tensor([float(own)]))) > 0

        def part(save: Callable[[Position], None] | None) -> tuple[float, float, int]:
            """Seconds of a save and of all, with the steps after it, and how many those are."""
            nonlocal number
            number += 1
            world.share(None)
            start = time.perf_counter()
            if save is not None:
                save(Position(step=number))
            stands = time.perf_counter() - start
            steps = 0
            while steps < given.steps or is_writing():
                step()
                steps += 1
            end = time.perf_counter()
            background.wait()
            stands += time.perf_counter() - end
            world.share(None)
            seconds = time.perf_counter() - start
            if world.logs:
                sys.stderr.write(f"part {number}: stands still {stands:.2f} s of {seconds:.1f} s, {steps} steps\n")
            return stands, seconds, steps

        for _ in range(2):
            step()
        before = _anonymous_bytes()
        first, *_ = part(background.save)
        grown = _anonymous_bytes() - before
        rows: dict[str, list[tuple[float, float, int]]] = {"sync": [], "async": [], "none": []}
        saves = {"sync": sync.save, "async": background.save, "none": None}
        for turn in range(given.rounds):
            # In another order each round.
            for name in (list(rows) * 2)[turn % 3 : turn % 3 + 3]:
                rows[name].append(part(saves[name]))
        stands = {name: _median(seconds for seconds, _, _ in found) for name, found in rows.items()}
        step_seconds = _median(seconds / steps for _, seconds, steps in rows["none"])
        extra = {
            name: _median(seconds - steps * step_seconds for _, seconds, steps in rows[name])
            for name in ("sync", "async")
        }
        own = {
            "buffer_gb": background.bytes / GB,
            "grown_gb": grown / GB,
            "writer_cpu_seconds": _median(background.cpu_seconds[1:]),
            "writer_seconds": _median(background.seconds[1:]),
            "fsync_seconds": _median(background.fsync_seconds[1:]),
        }
        everyone = world.gather(own)
        if world.logs:
            size = sum(path.stat().st_size for path in next((folder / "checkpoints").glob("step-*")).iterdir())
            result = {
                "parameters": sum(parameter.numel() for parameter in assembled.model.parameters()),
                "checkpoint_gb": size / GB,
                "fewest_steps_after_a_save": given.steps,
                "rounds": given.rounds,
                "step_seconds": step_seconds,
                "stands_still_seconds": {**stands, "first_async": first},
                "async_of_sync": stands["async"] / stands["sync"],
                "extra_wall_seconds": extra,
                "by_rank": everyone,
                "all": {name: [[round(value, 3) for value in row] for row in found] for name, found in rows.items()},
            }
            (folder / "result.json").write_text(json.dumps(result))
        world.share(None)
        stream.close()
        if world.logs:
            shutil.rmtree(folder / "checkpoints")


def _measured_saver() -> Any:
    from titanlab.checkpoint.saving import AsyncSaver

    class MeasuredSaver(AsyncSaver):
        """Measures its thread."""

        def __init__(self, target: Any) -> None:
            super().__init__(target)
            self.cpu_seconds: list[float] = []
            self.seconds: list[float] = []
            self.fsync_seconds: list[float] = []

        @property
        def bytes(self) -> int:
            memory = self._buffer._memory
            return 0 if memory is None else memory.nbytes

        def _complete(self, *given: Any) -> None:
            real, waited = os.fsync, 0.0

            def fsync(file: int) -> None:
                nonlocal waited
                start = time.perf_counter()
                real(file)
                if threading.current_thread().name == "checkpoint":
                    waited += time.perf_counter() - start

            os.fsync = fsync
            start, cpu = time.perf_counter(), time.thread_time()
            try:
                super()._complete(*given)
            finally:
                os.fsync = real
                self.cpu_seconds.append(time.thread_time() - cpu)
                self.seconds.append(time.perf_counter() - start)
                self.fsync_seconds.append(waited)

    return MeasuredSaver


def _anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def _median(values: Any) -> float:
    return float(statistics.median(values))


if __name__ == "__main__":
    main()
