"""From the shell to the end of the first step: titanlab beside a bare PyTorch loop, for 1 to 16 processes on this host.

Whole commands that train one step, in alternated pairs, one thread a process. Several processes shard the model with
FSDP2, one sequence each; the bare loop has torchrun. Of each command the seconds to the first finished step count, and
the processor time of all its processes from start to exit, which a busy machine changes less. Phases are those of the
run's `start_up.json`. Prints one JSON object: medians over the pairs. `--write` keeps it under benchmarks/results/.

    python benchmarks/start_up.py --write           a quarter of an hour on two cores
    python benchmarks/start_up.py --only one two --pairs 3
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TITANLAB = Path(sys.executable).parent / "titanlab"
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
# dim 64, 2 layers, 4/2 heads, ffn 192 is model=debug; the bare loop's defaults are those of model=llama_5m.
BARE_DEBUG = (
    *("--dim", "64", "--layers", "2", "--heads", "4", "--kv-heads", "2"),
    *("--ffn-dim", "192", "--batch", "1", "--seq", "64"),
)
DEBUG = ("model=debug", "training.seq_len=64")


@dataclass(frozen=True)
class Case:
    """What is started, by titanlab and by the bare loop."""

    processes: int
    overrides: tuple[str, ...]
    bare: tuple[str, ...]


CASES = {
    "one": Case(1, (*DEBUG, "training.global_batch=1"), BARE_DEBUG),
    "one_llama_5m": Case(1, ("model=llama_5m", "training.seq_len=512", "training.global_batch=8"), ()),
    **{
        name: Case(count, (*DEBUG, f"training.global_batch={count}", f"world={count}", "parallelism=fsdp"), BARE_DEBUG)
        for name, count in (("two", 2), ("eight", 8), ("sixteen", 16))
    },
}


@dataclass(frozen=True)
class Start:
    """One command: seconds to the first finished step, processor time of all its processes, seconds by phase."""

    first_step: float
    processor: float
    phases: dict[str, float] = field(default_factory=dict)


def bare(case: Case) -> Start:
    """Start the bare loop."""
    several = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.processes}")
    command = [sys.executable, *(several if case.processes > 1 else ()), str(HERE / "bare_loop.py"), "--steps", "1"]
    begun = time.time()
    output, processor = _executed([*command, *case.bare, *(("--fsdp",) if case.processes > 1 else ())])
    told = json.loads(next(line for line in output.splitlines() if line.startswith('{"first_step_at"')))
    return Start(told["first_step_at"] - begun, processor)


def titanlab(case: Case) -> Start:
    """Start the trainer, in a folder that goes away."""
    with tempfile.TemporaryDirectory() as runs:
        settings = ("training.steps=1", "optimizer.schedule.warmup_steps=0", "checkpoint.at_end=false")
        begun = time.time()
        _, processor = _executed([str(TITANLAB), "train", "data=synthetic", f"runs={runs}", *settings, *case.overrides])
        (folder,) = Path(runs).glob("*/*")
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        first = next(row for row in rows if row["kind"] == "train")
        phases = json.loads((folder / "attempts" / "1" / "start_up.json").read_text())["seconds"]
    return Start(first["time"] - begun, processor, phases)


def _executed(command: list[str]) -> tuple[str, float]:
    """A command's output, and the seconds of processor time of it and of the processes that it has waited for."""
    with tempfile.TemporaryFile() as output:
        actions = [(os.POSIX_SPAWN_DUP2, output.fileno(), number) for number in (1, 2)]
        pid = os.posix_spawn(command[0], command, ENVIRONMENT, file_actions=actions)
        _, status, used = os.wait4(pid, 0)
        output.seek(0)
        text = output.read().decode(errors="replace")
    if status:
        raise SystemExit(f"{' '.join(command)}\n{text}")
    return text, used.ru_utime + used.ru_stime


def alternate(case: Case, pairs: int) -> dict[str, Any]:
    """Both in turn, the order swapped every time; medians, and the median of the pairs' differences."""
    taken: list[tuple[Start, Start]] = []
    for number in range(pairs):
        if number % 2:
            theirs = bare(case)
            ours = titanlab(case)
        else:
            ours = titanlab(case)
            theirs = bare(case)
        taken.append((ours, theirs))
        clocks = f"titanlab {ours.first_step:.2f} s, bare {theirs.first_step:.2f} s to the first step"
        print(f"  {clocks}; processor time {ours.processor:.2f} s, {theirs.processor:.2f} s", file=sys.stderr)
    added = [ours.first_step - theirs.first_step for ours, theirs in taken]
    return {
        "processes": case.processes,
        "pairs": pairs,
        "overrides": case.overrides,
        "titanlab_first_step_s": _median(ours.first_step for ours, _ in taken),
        "bare_first_step_s": _median(theirs.first_step for _, theirs in taken),
        "added_s_to_first_step": _median(added),
        "added_s_range": [round(min(added), 3), round(max(added), 3)],
        "titanlab_processor_s": _median(ours.processor for ours, _ in taken),
        "bare_processor_s": _median(theirs.processor for _, theirs in taken),
        "added_processor_s": _median(ours.processor - theirs.processor for ours, theirs in taken),
        "phases_s": {phase: _median(ours.phases[phase] for ours, _ in taken) for phase in taken[0][0].phases},
    }


def _median(values: Any) -> float:
    return round(statistics.median(values), 3)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--write", action="store_true", help="keep the figures under benchmarks/results/")
    args = parser.parse_args()
    kept = HERE / "results" / "start_up.json"
    # One case may be measured anew beside the figures of the others.
    before = json.loads(kept.read_text()) if args.write and kept.exists() else {}
    figures: dict[str, Any] = before | {
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "torch": importlib.metadata.version("torch"),
    }
    for name in args.only:
        print(name, file=sys.stderr)
        figures[name] = alternate(CASES[name], args.pairs)
    text = json.dumps(figures, indent=2)
    print(text)
    if args.write:
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(text + "\n")


if __name__ == "__main__":
    main()
