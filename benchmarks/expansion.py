"""What planning a sweep costs: a thousand points expanded, composed and checked, and the runs that are left hashed.

Nothing is trained. Each round plans the whole sweep anew in a process of its own; the median over the rounds counts.
Seconds are of the processor, which others on the machine hardly change: planning has one thread, and waits for nothing.
Prints one JSON object; `--write` also keeps it under benchmarks/results/.

    python benchmarks/expansion.py --write
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
import time
from pathlib import Path

HERE = Path(__file__).parent
# 1,000 points: layouts × precisions × checkpointing × rates, some of which no condition lets through or no world fits.
SWEEP = (
    *("model=llama_5m", "data=synthetic", "compile=block", "optimizer.schedule.warmup_steps=0"),
    "parallelism=single,ddp,fsdp,fsdp_tp,fsdp_tp_pp",
    *("world=1,2,4,8", "precision=fp32,bf16", "ac=none,full,selective_op,selective_layer,memory_budget"),
    "optimizer.lr=1e-4,2e-4,4e-4,8e-4,1.6e-3",
)


def measure() -> dict[str, float]:
    """Seconds of each stage of one plan, in this process."""
    begun = time.process_time()
    # Importing is a part of what a person waits for.
    from titanlab.sweep import plan

    imported = time.process_time()
    request = plan.read_request(SWEEP)
    expanded = time.process_time()
    composer, checks = plan.Composer(request.loader, request.points), plan.Checks()
    kept, _ = plan.sift(
        request.points,
        lambda number: checks.planned(composer, request.points[number], request.where),
        whole=False,
    )
    checked = time.process_time()
    for recipe in kept.values():
        checks.identify(recipe)
    hashed = time.process_time()
    return {
        "points": len(request.points),
        "survivors": len(kept),
        "import_seconds": imported - begun,
        "expand_seconds": expanded - imported,
        "compose_and_check_ms_each": 1e3 * (checked - expanded) / len(request.points),
        "hash_ms_each": 1e3 * (hashed - checked) / len(kept),
        "plan_seconds": hashed - imported,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--once", action="store_true", help="one round, in this process")
    parser.add_argument("--write", action="store_true", help="keep the figures under benchmarks/results/")
    args = parser.parse_args()
    if args.once:
        print(json.dumps(measure()))
        return
    rounds = []
    for _ in range(args.rounds):
        done = subprocess.run([sys.executable, __file__, "--once"], capture_output=True, text=True, check=True)
        rounds.append(json.loads(done.stdout))
    figures = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "hydra": importlib.metadata.version("hydra-core"),
        "rounds": args.rounds,
        **{name: round(statistics.median(each[name] for each in rounds), 3) for name in rounds[0]},
        "plan_seconds_range": [round(edge(each["plan_seconds"] for each in rounds), 3) for edge in (min, max)],
    }
    text = json.dumps(figures, indent=2)
    print(text)
    if args.write:
        kept = HERE / "results" / "expansion.json"
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(text + "\n")


if __name__ == "__main__":
    main()
