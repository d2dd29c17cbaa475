"""Seconds that the planner takes: wall time and the CPU time of its process.

Prints a table and one JSON object. `--write` keeps the figures under benchmarks/results/.

    python benchmarks/planner.py            a minute on two idle cores
    python benchmarks/planner.py --write
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
# The bare interpreter and the composition of the recipe are in each of them; the first row has nothing else.
COMMANDS = {
    "compose a recipe": ["train", "+recipe=llama3_1_405b_512gpus", "cluster=h100", "--cfg", "job"],
    "8B on 512 GPUs": [
        "plan", "+recipe=llama3_1_8b_128gpus", "cluster=h100", "world=512", "training.global_batch=1024",
    ],
    "405B on 512 GPUs": ["plan", "+recipe=llama3_1_405b_512gpus", "cluster=h100"],
    "405B on 16,384 GPUs": [
        "plan", "+recipe=llama3_1_405b_512gpus", "cluster=h100", "world=16384", "training.global_batch=2048",
    ],
    "sweep of 1,000 points": [
        "sweep", "+recipe=llama3_1_8b_8gpus", "cluster=h100", "launch=slurm", "ac=full,selective_op", "--dry-run",
        "training.steps=" + ",".join(str(1000 + n) for n in range(100)), "training.global_batch=8,16,24,32,40",
    ],
}  # fmt: skip


def measured(arguments: list[str], *, repeats: int) -> dict[str, float]:
    """The fastest of some runs of `titanlab`."""
    best = {"wall_seconds": float("inf"), "cpu_seconds": float("inf")}
    for _ in range(repeats):
        before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "titanlab", *arguments], capture_output=True, text=True, check=False
        )
        wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        best = {"wall_seconds": min(best["wall_seconds"], wall), "cpu_seconds": min(best["cpu_seconds"], cpu)}
    return best


def main() -> None:
    """Measure, print, and with `--write` keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name, arguments in COMMANDS.items():
        rows.append({"what": name, **measured(arguments, repeats=args.repeats)})
        print(f"{name:<24} {rows[-1]['wall_seconds']:7.2f} s wall {rows[-1]['cpu_seconds']:7.2f} s CPU", flush=True)
    found = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "python": platform.python_version(),
        "machine": "2 shared CPU cores",
        "rows": rows,
    }
    print(json.dumps(found))
    if args.write:
        (HERE / "results" / "planner.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
