"""Kills a training with asynchronous checkpoints at random moments, again and again, and restarts it each time.

Ways to kill, in turns: the whole tree of processes; one rank; the launcher; the whole tree while a checkpoint is
written. After each kill the newest checkpoint must be whole (every byte is read), and the restart must go on from it.
No more steps than the interval may be lost, or twice the interval if a checkpoint was being written. When a training is
complete, its losses must equal, bit for bit, those of one that nobody has disturbed; then the next one begins. Writes a
report after each kill, so that a long test that is ended itself has one too. The exit code is 1 if anything was wrong.

    python benchmarks/torture.py --kills 200 --report torture.json
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from titanlab.checkpoint import read_contents, step_of
from titanlab.checkpoint.folders import checkpoints
from titanlab.errors import ConfigError
from titanlab.records import OutcomeKind, RunFolder, list_runs

KINDS = ("tree", "rank", "launcher", "while writing")
# A start of four ranks on a busy host, and an end in which they save.
PATIENCE_SECONDS = 300.0
_LOOK_SECONDS = 0.002


class Failed(Exception):
    """Something that must not happen."""


class Training:
    """Runs of one recipe in a folder, one after the other.

    Args:
        folder: of the runs.
        world: number of ranks.
        steps, every: of a run, and between checkpoints.
    """

    def __init__(self, folder: Path, *, world: int, steps: int, every: int) -> None:
        self.folder, self.every, self.steps = folder, every, steps
        self.process: subprocess.Popen[bytes] | None = None
        self._overrides = [
            *("model=debug", "model.vocab_size=8192", "data=synthetic", "data.vocab_size=8192", f"world={world}"),
            *(
                "training.seq_len=32",
                f"training.global_batch={world}",
                f"training.steps={steps}",
                "training.log_every=1",
            ),
            *("training.validate_every=0", "optimizer.schedule.warmup_steps=1", "cluster.peak_tflops=1"),
            *("cluster.accelerator=cpu", "checkpoint=async", f"checkpoint.every={every}", "name=torture"),
            *([] if world == 1 else ["parallelism=fsdp"]),
        ]

    def start(self, repeat: int) -> subprocess.Popen[bytes]:
        """Begin a run, or go on with it."""
        with (self.folder / "output.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "titanlab", "train", *self._overrides, f"repeat={repeat}"],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return self.process

    def end(self) -> None:
        """End what still runs, after something was wrong."""
        if self.process is not None and self.process.poll() is None:
            for pid in [*_descendants(self.process.pid), self.process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait()

    def run(self, repeat: int) -> RunFolder | None:
        """The folder of a run, if it has begun."""
        for run in list_runs(self.folder / "runs"):
            with contextlib.suppress(OSError, ConfigError):
                if run.config().get("repeat") == repeat:
                    return run
        return None

    def undisturbed(self) -> list[float]:
        """The losses of a run that nobody disturbs."""
        process = self.start(0)
        if process.wait(PATIENCE_SECONDS):
            raise Failed(f"the run that nobody disturbs ended with {process.returncode}")
        run = self.run(0)
        assert run is not None
        return losses(run)


def losses(run: RunFolder) -> list[float]:
    """The losses of a run's steps, of which each counts once."""
    rows = run.metrics("train")
    if [row["step"] for row in rows] != list(range(1, len(rows) + 1)):
        raise Failed("metrics.jsonl lacks a step, or has one twice")
    return [row["loss_metrics/global_avg_loss"] for row in rows]


def main() -> int:
    """Kill, restart, compare; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--steps", type=int, default=400, help="of each run")
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--seconds", type=float, default=3.0, help="most seconds of steps before a kill")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help="for the runs (default: for temporary files)")
    parser.add_argument("--report", type=Path, default=Path("torture.json"))
    given = parser.parse_args()
    report: dict[str, Any] = {"kills": [], "complete_runs": 0, "wrong": []}
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(dir=given.folder, ignore_cleanup_errors=True) as folder:
        training = Training(Path(folder), world=given.world, steps=given.steps, every=given.every)
        try:
            for _ in _torture(training, given, report):
                _write(given.report, report, given, time.monotonic() - begin)
        except (Failed, ConfigError, TimeoutError, subprocess.TimeoutExpired) as error:
            output = (Path(folder) / "output.log").read_text(errors="replace").splitlines()[-40:]
            training.end()
            report["wrong"].append({"error": f"{type(error).__name__}: {error}", "output": output})
        _write(given.report, report, given, time.monotonic() - begin)
    print(json.dumps({name: value for name, value in json.loads(given.report.read_text()).items() if name != "kills"}))
    return 1 if report["wrong"] else 0


def _torture(training: Training, given: argparse.Namespace, report: dict[str, Any]) -> Iterator[None]:
    chance = random.Random(given.seed)
    expected = training.undisturbed()
    repeat, newest, attempts = 1, 0, 0
    while len(report["kills"]) < given.kills:
        kind = KINDS[len(report["kills"]) % len(KINDS)]
        process = training.start(repeat)
        begin = time.monotonic()
        run = _until(functools.partial(training.run, repeat), process)
        is_complete = run is None or not _until(functools.partial(_begins, run, attempts, process), process)
        started = time.monotonic() - begin
        if not is_complete:
            assert run is not None
            resumed = run.metrics("attempt")[-1]["step"]
            if resumed != newest:
                raise Failed(f"attempt {attempts + 1} goes on from step {resumed}, and the newest was {newest}")
            killed = _kill(process, run, kind, chance, given.seconds)
            is_complete = run.result() is not None and run.result().kind is OutcomeKind.DONE  # type: ignore[union-attr]
        if run is None:
            raise Failed(f"a start ended with {process.poll()} and no run")
        if is_complete:
            process.wait(PATIENCE_SECONDS)
            _compare(run, expected)
            report["complete_runs"] += 1
            repeat, newest, attempts = repeat + 1, 0, 0
            continue
        attempts = max(run.attempts())
        newest = _newest(run)
        rows = run.metrics("train")
        last = rows[-1]["step"] if rows else 0
        most = training.every * (2 if killed["writing"] else 1)
        row = {"kind": kind, **killed, "run": repeat, "step": last, "checkpoint": newest, "start_seconds": started}
        report["kills"].append(row)
        if last - newest > most:
            raise Failed(f"{last - newest} steps are lost, and {most} may be: {row}")
        yield
    # The last run is complete too.
    process = training.start(repeat)
    if process.wait(PATIENCE_SECONDS):
        raise Failed(f"the last start ended with {process.returncode}")
    run = training.run(repeat)
    assert run is not None
    _compare(run, expected)
    report["complete_runs"] += 1


def _begins(run: RunFolder, attempts: int, process: subprocess.Popen[bytes]) -> bool | None:
    """Whether the next attempt has loaded its checkpoint; None: not yet; False: the process has ended instead."""
    if len(run.metrics("attempt")) > attempts:
        return True
    return None if process.poll() is None else False


def _kill(
    process: subprocess.Popen[bytes], run: RunFolder, kind: str, chance: random.Random, seconds: float
) -> dict[str, Any]:
    """Kill after a random time; returns what was known at that moment."""
    end = time.monotonic() + chance.uniform(0.0, seconds)
    while time.monotonic() < end and process.poll() is None:
        time.sleep(_LOOK_SECONDS)
    if kind == "while writing":
        end = time.monotonic() + PATIENCE_SECONDS
        while not _writes(run) and process.poll() is None and time.monotonic() < end:
            time.sleep(_LOOK_SECONDS / 4)
        # The moment within the write is random too.
        time.sleep(chance.uniform(0.0, 0.01))
    tree = [process.pid, *_descendants(process.pid)]
    ranks = [pid for pid in tree if _logs_as_rank(pid)]
    writing = _writes(run)
    pids = {"rank": [chance.choice(ranks)] if ranks else [], "launcher": [process.pid]}.get(kind, tree)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    writing |= _writes(run)
    _until_gone(process, tree)
    return {"writing": writing, "processes": len(pids)}


def _writes(run: RunFolder) -> bool:
    return any(run.checkpoints.glob("step-*.part"))


def _newest(run: RunFolder) -> int:
    """The step of the newest checkpoint, of which every byte is read; 0: there is none."""
    whole = checkpoints(run.checkpoints)
    if not whole:
        return 0
    read_contents(whole[-1], "run").verify()
    return step_of(whole[-1])


def _compare(run: RunFolder, expected: list[float]) -> None:
    found = losses(run)
    if found != expected:
        step = next(
            (number for number, pair in enumerate(zip(found, expected, strict=False)) if pair[0] != pair[1]), len(found)
        )
        raise Failed(f"the losses of {run.path.name} differ from step {step + 1} on")


def _until(look: Callable[[], Any], process: subprocess.Popen[bytes]) -> Any:
    """What `look` returns once it is not None; None if the process has ended before."""
    end = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end:
        is_over = process.poll() is not None
        found = look()
        if found is not None or is_over:
            return found
        time.sleep(0.05)
    raise TimeoutError("a start takes too long")


def _until_gone(process: subprocess.Popen[bytes], tree: list[int]) -> None:
    """Wait until all processes are gone: ranks without a launcher save, and end."""
    process.wait(PATIENCE_SECONDS)
    end = time.monotonic() + PATIENCE_SECONDS
    while any((fields := _stat(pid)) and fields[0] != "Z" for pid in tree):
        if time.monotonic() > end:
            raise TimeoutError("processes of a killed training do not end")
        time.sleep(0.05)


def _stat(pid: str | int) -> list[str]:
    """Fields of /proc/PID/stat after the name: state, parent …; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _descendants(pid: int) -> list[int]:
    parents = {int(path.name): fields for path in Path("/proc").glob("[0-9]*") if (fields := _stat(path.name))}
    found = [pid]
    for parent in found:
        found += [child for child, fields in parents.items() if int(fields[1]) == parent]
    return found[1:]


def _logs_as_rank(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(os.readlink(f"/proc/{pid}/fd/1")).name.startswith("rank-")
    return False


def _write(path: Path, report: dict[str, Any], given: argparse.Namespace, seconds: float) -> None:
    kills = report["kills"]
    lost = [row["step"] - row["checkpoint"] for row in kills]
    content = {
        "date": datetime.now(tz=UTC).date().isoformat(),
        "settings": {name: getattr(given, name) for name in ("world", "steps", "every", "seconds", "seed")},
        "seconds": round(seconds),
        "count": len(kills),
        "by_kind": {kind: sum(row["kind"] == kind for row in kills) for kind in KINDS},
        "while_a_checkpoint_was_written": sum(row["writing"] for row in kills),
        "most_steps_lost": max(lost, default=0),
        "median_steps_lost": statistics.median(lost) if lost else 0,
        "complete_runs": report["complete_runs"],
        "wrong": report["wrong"],
        "kills": kills,
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
