"""Processor time of a training step of llama_5m, 8 sequences of 512 tokens: tiles of attention, fused projections.

Each variant trains in one process with one thread; the processes alternate. Prints one JSON object: the median of the
steps' seconds after the first two, over all processes of a variant. `--write` keeps it under benchmarks/results/.

    OMP_NUM_THREADS=1 python benchmarks/fused_step.py     about four minutes
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

KEPT = Path(__file__).parent / "results" / "fused_step.json"
# `flash` is torch's kernel for the whole square.
VARIANTS = {
    "plain": ("model.attention=flash",),
    "tiles": (),
    "fused": ("model.attention=flash", "model.fused=true"),
    "tiles and fused": ("model.fused=true",),
}
STEP = ("model=llama_5m", "data=synthetic", "training.seq_len=512", "training.global_batch=8", "checkpoint=off")
UNMEASURED = 2


def main() -> None:
    """Measure and print, or be one of the processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--write", action="store_true", help="keep the figures under benchmarks/results/")
    parser.add_argument("--train", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train is not None:
        print(json.dumps(step_seconds(args.train)))
        return
    found: dict[str, dict[str, list[float]]] = {}
    for number in range(args.rounds):
        for precision in ("fp32", "bf16"):
            for name in list(VARIANTS)[:: 1 if number % 2 == 0 else -1]:
                overrides = [*STEP, f"precision={precision}", f"training.steps={args.steps}", *VARIANTS[name]]
                command = [sys.executable, __file__, "--train", *overrides]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                seconds = json.loads(done.stdout.splitlines()[-1])
                found.setdefault(precision, {}).setdefault(name, []).extend(seconds[UNMEASURED:])
    figures = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "torch": torch.__version__,
        "step_seconds": {
            precision: {name: round(statistics.median(steps), 4) for name, steps in variants.items()}
            for precision, variants in found.items()
        },
    }
    text = json.dumps(figures, indent=2)
    print(text)
    if args.write:
        KEPT.write_text(text + "\n")


def step_seconds(overrides: list[str]) -> list[float]:
    """Train in this process; the processor time between the ends of steps."""
    from titanlab.cli.compose import compose_one
    from titanlab.distributed import ALONE
    from titanlab.recipe import read_flags, resolve, to_mapping
    from titanlab.records import create_run, identify
    from titanlab.train import Observer
    from titanlab.train.train import train

    torch.set_num_threads(1)
    ends: list[float] = []

    class Clock(Observer):
        def with_gradients(self, step: int, model: torch.nn.Module) -> None:
            ends.append(time.process_time())

    with tempfile.TemporaryDirectory() as folder:
        composed = compose_one(read_flags([*overrides, f"runs={folder}"]))
        assert composed is not None
        recipe = resolve(composed[1], world=None, accelerator="cpu", device="cpu")
        run = create_run(
            folder,
            sweep=recipe.sweep,
            name=recipe.name,
            identity=identify(recipe, data="none", hardware="cpu"),
            config=to_mapping(recipe),
        )
        run.begin_attempt(to_mapping(recipe), {})
        train(recipe, run, ALONE, observer=Clock())
    return [after - before for before, after in zip(ends, ends[1:], strict=False)]


if __name__ == "__main__":
    main()
