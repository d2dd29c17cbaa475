"""What the trainer costs beside a bare PyTorch loop on the same model, in alternated whole-process runs.

Prints one JSON object: medians over the pairs, each ratio titanlab / bare. `--write` also keeps it under
benchmarks/results/.

    python benchmarks/step_cost.py            all four parts, about a quarter of an hour on two cores
    python benchmarks/step_cost.py --only tiny --pairs 3
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TITANLAB = Path(sys.executable).parent / "titanlab"
UNMEASURED = 3

# dim 256, 6 layers, 8/4 heads, ffn 768, vocab 2048 is model=llama_5m; seq 512, batch 8 as in the project's bars.
FULL = ("model=llama_5m", "training.seq_len=512", "training.global_batch=8")
TINY = ("model=debug", "training.seq_len=64", "training.global_batch=1")
BARE_TINY = (
    "--dim",
    "64",
    "--layers",
    "2",
    "--heads",
    "4",
    "--kv-heads",
    "2",
    "--ffn-dim",
    "192",
    "--batch",
    "1",
    "--seq",
    "64",
)


@dataclass(frozen=True)
class Timing:
    """Seconds of one process: from the shell to the first finished step, and the median step after the first few."""

    first_step: float
    step: float


def bare(steps: int, *arguments: str) -> Timing:
    """Run the bare loop once."""
    started = time.time()
    done = subprocess.run(
        [sys.executable, str(HERE / "bare_loop.py"), "--steps", str(steps), *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    told = json.loads(done.stdout.splitlines()[-1])
    return Timing(told["first_step_at"] - started, statistics.median(told["step_seconds"][UNMEASURED:]))


def titanlab(steps: int, *overrides: str) -> Timing:
    """Run the trainer once, in a folder that goes away."""
    with tempfile.TemporaryDirectory() as runs:
        started = time.time()
        subprocess.run(
            [
                str(TITANLAB),
                "train",
                "data=synthetic",
                f"runs={runs}",
                f"training.steps={steps}",
                f"training.unmeasured_steps={UNMEASURED}",
                "optimizer.schedule.warmup_steps=0",
                "checkpoint.at_end=false",
                *overrides,
            ],
            capture_output=True,
            check=True,
        )
        (folder,) = Path(runs).glob("*/*")
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        first = next(row for row in rows if row["kind"] == "train")
        result = json.loads((folder / "result.json").read_text())
    return Timing(first["time"] - started, result["metrics"]["time_metrics/end_to_end(s)"])


def alternate(pairs: int, ours: Callable[[], Timing], theirs: Callable[[], Timing]) -> dict[str, Any]:
    """Both in turn, the order swapped every time; medians, and the median of the pairs' ratios."""
    taken: list[tuple[Timing, Timing]] = []
    for number in range(pairs):
        if number % 2:
            b = theirs()
            a = ours()
        else:
            a = ours()
            b = theirs()
        taken.append((a, b))
        print(
            f"  pair {number + 1}: titanlab {1e3 * a.step:.2f} ms, bare {1e3 * b.step:.2f} ms a step", file=sys.stderr
        )
    ratios = [b.step / a.step for a, b in taken]
    return {
        "pairs": pairs,
        "titanlab_step_ms": 1e3 * statistics.median(a.step for a, _ in taken),
        "bare_step_ms": 1e3 * statistics.median(b.step for _, b in taken),
        "throughput_ratio": statistics.median(ratios),
        "throughput_ratio_range": [min(ratios), max(ratios)],
        "added_ms_a_step": 1e3 * statistics.median(a.step - b.step for a, b in taken),
        "titanlab_first_step_s": statistics.median(a.first_step for a, _ in taken),
        "bare_first_step_s": statistics.median(b.first_step for _, b in taken),
        "added_s_to_first_step": statistics.median(a.first_step - b.first_step for a, b in taken),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12, help="of the full-size parts")
    parser.add_argument("--only", choices=("fp32", "bf16", "tiny"))
    parser.add_argument("--write", action="store_true", help="keep the figures under benchmarks/results/")
    args = parser.parse_args()
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "fp32": lambda: alternate(args.pairs, lambda: titanlab(args.steps, *FULL), lambda: bare(args.steps)),
        "bf16": lambda: alternate(
            args.pairs, lambda: titanlab(args.steps, *FULL, "precision=bf16"), lambda: bare(args.steps, "--bf16")
        ),
        "tiny": lambda: alternate(args.pairs, lambda: titanlab(400, *TINY), lambda: bare(400, *BARE_TINY)),
    }
    kept = HERE / "results" / "step_cost.json"
    # One part may be measured anew beside the figures of the others.
    before = json.loads(kept.read_text()) if args.write and kept.exists() else {}
    figures: dict[str, Any] = before | {
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "torch": _version("torch"),
    }
    for name, measure in parts.items():
        if args.only in (None, name):
            print(name, file=sys.stderr)
            figures[name] = measure()
    if {"fp32", "bf16"} <= figures.keys():
        figures["bf16_over_fp32"] = {
            who: figures["fp32"][f"{who}_step_ms"] / figures["bf16"][f"{who}_step_ms"] for who in ("titanlab", "bare")
        }
    text = json.dumps(figures, indent=2)
    print(text)
    if args.write:
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(text + "\n")


def _version(package: str) -> str:

    return importlib.metadata.version(package)


if __name__ == "__main__":
    main()
