"""What compilation gains on the CPU: the trainer with compile=off and compile=block in alternated whole processes.

Prints one JSON object: for fp32 and bf16 the medians of a step over the rounds, their ratio eager / compiled, and how
long compiling took with an empty cache of inductor's and with a full one. `--write` also keeps it under
benchmarks/results/.

    python benchmarks/compile.py              both precisions, about eight minutes on two cores
    python benchmarks/compile.py --only fp32 --rounds 2
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
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
TITANLAB = Path(sys.executable).parent / "titanlab"
UNMEASURED = 3
# As in benchmarks/step_cost.py: the project's benchmark model.
MODEL = ("model=llama_5m", "training.seq_len=512", "training.global_batch=8")


class Run(NamedTuple):
    """Seconds of one process: the median step after the first few, and the time spent on compiling."""

    step: float
    compiling: float
    recompilations: int


def run(steps: int, cache: Path, *overrides: str) -> Run:
    """Train once, in a folder that goes away."""
    with tempfile.TemporaryDirectory() as runs:
        command = [
            *(str(TITANLAB), "train", "data=synthetic", f"runs={runs}", *MODEL),
            *(f"training.steps={steps}", f"training.unmeasured_steps={UNMEASURED}"),
            *("optimizer.schedule.warmup_steps=0", "checkpoint.at_end=false", *overrides),
        ]
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
        subprocess.run(command, capture_output=True, check=True, env=environment)
        (folder,) = Path(runs).glob("*/*")
        metrics = json.loads((folder / "result.json").read_text())["metrics"]
    return Run(
        metrics["time_metrics/end_to_end(s)"],
        metrics.get("compile/seconds", 0.0),
        metrics.get("compile/recompilations", 0),
    )


def compare(rounds: int, steps: int, *overrides: str) -> dict[str, Any]:
    """Eager and compiled in turn, the order swapped every time; the first compiled process has an empty cache."""
    eager: list[Run] = []
    compiled: list[Run] = []
    with tempfile.TemporaryDirectory() as cache:
        for number in range(rounds):
            turns = [(eager, "compile=off"), (compiled, "compile=block")]
            for taken, choice in turns if number % 2 == 0 else reversed(turns):
                taken.append(run(steps, Path(cache), choice, *overrides))
            a, b = eager[-1], compiled[-1]
            line = f"eager {1e3 * a.step:.0f} ms, compiled {1e3 * b.step:.0f} ms a step, {b.compiling:.1f} s compiling"
            print(f"  round {number + 1}: {line}", file=sys.stderr)
    ratios = [a.step / b.step for a, b in zip(eager, compiled, strict=True)]
    return {
        "rounds": rounds,
        "eager_step_ms": 1e3 * statistics.median(each.step for each in eager),
        "compiled_step_ms": 1e3 * statistics.median(each.step for each in compiled),
        "speed_ratio": statistics.median(ratios),
        "speed_ratio_range": [min(ratios), max(ratios)],
        "cold_compile_s": compiled[0].compiling,
        "warm_compile_s": statistics.median(each.compiling for each in compiled[1:]) if rounds > 1 else None,
        "recompilations": sum(each.recompilations for each in compiled),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--only", choices=("fp32", "bf16"))
    parser.add_argument("--write", action="store_true", help="keep the figures under benchmarks/results/")
    args = parser.parse_args()
    kept = HERE / "results" / "compile.json"
    # One part may be measured anew beside the figures of the other.
    before = json.loads(kept.read_text()) if args.write and kept.exists() else {}
    figures: dict[str, Any] = before | {
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "threads": os.environ.get("OMP_NUM_THREADS", "as many as torch takes"),
        "torch": importlib.metadata.version("torch"),
    }
    for precision in ("fp32", "bf16"):
        if args.only in (None, precision):
            print(precision, file=sys.stderr)
            figures[precision] = compare(args.rounds, args.steps, f"precision={precision}")
    text = json.dumps(figures, indent=2)
    print(text)
    if args.write:
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(text + "\n")


if __name__ == "__main__":
    main()
