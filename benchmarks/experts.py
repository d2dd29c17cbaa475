"""What models with experts cost: one process beside a bare loop, and expert parallelism beside FSDP2 on two processes.

Runs are whole processes in turns. A ratio of the clock says little on a machine that others use too, so processor time
is compared beside it: of a run of a few steps and of a longer one, whose difference has no start-up. Each process has
one thread. Prints one JSON object; `--write` also keeps it under benchmarks/results/.

    python benchmarks/experts.py              both parts, about a quarter of an hour on two cores
    python benchmarks/experts.py --only layouts --pairs 3
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TITANLAB = Path(sys.executable).parent / "titanlab"
UNMEASURED = 3
# The same sizes in both loops: 8.1 M parameters, of which 3.4 M compute a token.
SIZES = {
    "dim": 256, "layers": 4, "heads": 8, "kv_heads": 4, "head_dim": 32, "ffn_dim": 256, "experts": 8,
    "vocab_size": 2048,
}  # fmt: skip
SEQ_LEN, BATCH = 256, 8
# By part: the least that the ratio of the speeds must be.
BARS = {"bare": 0.9, "layouts": 0.95}


@dataclass(frozen=True)
class Timing:
    """Seconds of a step: median of the clock after the first few, and processor time of all processes."""

    step: float
    processor: float


def measured(run: Callable[[int], list[float]], steps: int) -> Timing:
    """Time a run of so many steps, and a short one for what a start costs.

    Args:
        run: trains so many steps; returns the seconds of those after the first few.
    """
    spent, seconds = [], []
    for count in (UNMEASURED + 1, steps):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = run(count)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return Timing(statistics.median(seconds), (spent[1] - spent[0]) / (steps - UNMEASURED - 1))


def bare(steps: int) -> list[float]:
    """Run the bare loop once."""
    flags = {"vocab" if name == "vocab_size" else name.replace("_", "-"): value for name, value in SIZES.items()}
    flags |= {"steps": steps, "seq": SEQ_LEN, "batch": BATCH}
    command = [sys.executable, str(HERE / "bare_expert_loop.py")]
    done = _run([*command, *(part for name, value in flags.items() for part in (f"--{name}", str(value)))])
    found: list[float] = json.loads(done.splitlines()[-1])["step_seconds"][UNMEASURED:]
    return found


def titanlab(steps: int, *overrides: str) -> list[float]:
    """Run the trainer once, in a folder that goes away."""
    with tempfile.TemporaryDirectory() as runs:
        given = [
            *(f"model.{name}={value}" for name, value in SIZES.items()),
            f"runs={runs}",
            f"training.steps={steps}",
            f"training.unmeasured_steps={UNMEASURED}",
            f"training.seq_len={SEQ_LEN}",
            f"training.global_batch={BATCH}",
            "training.log_every=1",
            "optimizer.schedule.warmup_steps=0",
            "checkpoint.at_end=false",
            # A peak that is given need not be measured.
            "cluster.peak_tflops=1",
        ]
        _run([str(TITANLAB), "train", "model=qwen3_moe_debug", "data=synthetic", *given, *overrides])
        (file,) = Path(runs).glob("*/*/metrics.jsonl")
        rows = [json.loads(line) for line in file.read_text().splitlines()]
    steps_after = [row for row in rows if row["kind"] == "train" and row["step"] > UNMEASURED]
    return [row["time_metrics/end_to_end(s)"] for row in steps_after]


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def alternate(pairs: int, first: Callable[[], Timing], second: Callable[[], Timing], names: tuple[str, str]) -> Any:
    """Both in turn, the order swapped every time; medians, and the median of the pairs' ratios of speed."""
    taken: list[tuple[Timing, Timing]] = []
    for number in range(pairs):
        if number % 2:
            b = second()
            a = first()
        else:
            a = first()
            b = second()
        taken.append((a, b))
        print(f"  pair {number + 1}: {_text(names[0], a)}; {_text(names[1], b)}", file=sys.stderr)
    found: dict[str, Any] = {"pairs": pairs}
    for kind in ("step", "processor"):
        values = [(getattr(a, kind), getattr(b, kind)) for a, b in taken]
        ratios = [b / a for a, b in values]
        label = "clock" if kind == "step" else kind
        found |= {
            f"{names[0]}_{label}_ms": 1e3 * statistics.median(a for a, _ in values),
            f"{names[1]}_{label}_ms": 1e3 * statistics.median(b for _, b in values),
            f"{label}_ratio": statistics.median(ratios),
            f"{label}_ratio_range": [min(ratios), max(ratios)],
        }
    return found


def _text(name: str, timing: Timing) -> str:
    return f"{name} {1e3 * timing.step:.0f} ms a step, {1e3 * timing.processor:.0f} ms of processor time"


def main() -> None:
    """Measure and print; exit code 1 if a ratio of processor times is below its bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--only", choices=tuple(BARS))
    parser.add_argument("--write", action="store_true", help="keep the figures under benchmarks/results/")
    args = parser.parse_args()
    if args.steps < UNMEASURED + 2:
        parser.error(f"--steps: at least {UNMEASURED + 2}")

    def ours(*overrides: str) -> Callable[[], Timing]:
        return lambda: measured(lambda steps: titanlab(steps, *overrides), args.steps)

    two = ("world=2", "parallelism=fsdp")
    parts: Mapping[str, Callable[[], Any]] = {
        "bare": lambda: alternate(args.pairs, ours(), lambda: measured(bare, args.steps), ("titanlab", "bare")),
        "layouts": lambda: alternate(
            args.pairs, ours(*two, "parallelism.expert=2"), ours(*two), ("expert_2", "fsdp_2")
        ),
    }
    kept = HERE / "results" / "experts.json"
    # One part may be measured anew beside the figures of the other.
    before = json.loads(kept.read_text()) if args.write and kept.exists() else {}
    figures: dict[str, Any] = before | {
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "torch": importlib.metadata.version("torch"),
    }
    missed = []
    for name, measure in parts.items():
        if args.only in (None, name):
            print(name, file=sys.stderr)
            figures[name] = {"bar": BARS[name], **measure()}
            if figures[name]["processor_ratio"] < BARS[name]:
                missed.append(name)
    text = json.dumps(figures, indent=2)
    print(text)
    if args.write:
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(text + "\n")
    raise SystemExit(1 if missed else 0)


if __name__ == "__main__":
    main()
