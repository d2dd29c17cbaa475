"""What each dimension of parallelism costs on two CPU processes, beside a bare `fully_shard` loop on the same work.

Whole-process runs of `titanlab train`, one thread a process, in rounds: in each round the bare loop and every
variant once, in an order that changes. A variant's share is its tokens/s over the bare loop's of the same round; the
median over the rounds counts. Prints one JSON object; `--write` also keeps it under benchmarks/results/.

    python benchmarks/dimensions.py --rounds 7 --write      two and a half minutes a round on two cores
    python benchmarks/dimensions.py --only fsdp tp --rounds 3
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

HERE = Path(__file__).parent
TITANLAB = Path(sys.executable).parent / "titanlab"
UNMEASURED = 3
BATCH, SEQ = 8, 512
# dim 256, 6 layers, 8/4 heads, ffn 768, vocab 2048 is model=llama_5m. A pipeline has four microbatches.
WORK = ("model=llama_5m", f"training.seq_len={SEQ}", f"training.global_batch={BATCH}", "world=2")
PIPELINE = ("parallelism=pp", f"training.microbatch={BATCH // 4}")

VARIANTS: dict[str, tuple[str, ...]] = {
    "fsdp": ("parallelism=fsdp",),
    "ddp": ("parallelism=ddp",),
    "tp": ("parallelism=tp", "parallelism.sequence_parallel=false"),
    "tp_sequence_parallel": ("parallelism=tp",),
    "pp_1f1b": (*PIPELINE, "schedule=1f1b"),
    "pp_zbv": (*PIPELINE, "schedule=zbv"),
    "cp_ring": ("parallelism=cp",),
    "cp_all_gather": ("parallelism=cp", "parallelism.context_method=all_gather"),
}


def bare(steps: int) -> float:
    """Seconds of a step of the bare loop under torchrun, each process with its half of the batch."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    loop = [str(HERE / "bare_loop.py"), "--fsdp", "--batch", str(BATCH // 2), "--seq", str(SEQ), "--steps", str(steps)]
    done = subprocess.run(
        [*command, *loop],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    told = json.loads(done.stdout.splitlines()[-1])
    return statistics.median(told["step_seconds"][UNMEASURED:])


def titanlab(steps: int, *overrides: str) -> float:
    """Seconds of a step of the trainer, in a folder that goes away."""
    with tempfile.TemporaryDirectory() as runs:
        command = [
            *(str(TITANLAB), "train", "data=synthetic", f"runs={runs}", *WORK),
            *(f"training.steps={steps}", f"training.unmeasured_steps={UNMEASURED}"),
            *("optimizer.schedule.warmup_steps=0", "checkpoint.at_end=false", *overrides),
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
        (folder,) = Path(runs).glob("*/*")
        result = json.loads((folder / "result.json").read_text())
    return float(result["metrics"]["time_metrics/end_to_end(s)"])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--write", action="store_true", help="keep the figures under benchmarks/results/")
    args = parser.parse_args()
    bare_seconds: list[float] = []
    seconds: dict[str, list[float]] = {name: [] for name in args.only}
    for number in range(args.rounds):
        order = ["bare", *args.only]
        shift = number * 4 % len(order)
        for name in order[shift:] + order[:shift]:
            taken = bare(args.steps) if name == "bare" else titanlab(args.steps, *VARIANTS[name])
            (bare_seconds if name == "bare" else seconds[name]).append(taken)
            print(f"round {number + 1}: {name} {1e3 * taken:.0f} ms a step", file=sys.stderr, flush=True)
    figures = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "torch": importlib.metadata.version("torch"),
        "rounds": args.rounds,
        "bare_fully_shard_tokens_per_second": BATCH * SEQ / statistics.median(bare_seconds),
        "share_of_bare": {
            name: {
                "median": round(statistics.median(b / s for b, s in zip(bare_seconds, taken, strict=True)), 3),
                "range": [
                    round(edge(b / s for b, s in zip(bare_seconds, taken, strict=True)), 3) for edge in (min, max)
                ],
                "overrides": VARIANTS[name],
            }
            for name, taken in seconds.items()
        },
    }
    text = json.dumps(figures, indent=2)
    print(text)
    if args.write:
        kept = HERE / "results" / "dimensions.json"
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(text + "\n")


if __name__ == "__main__":
    main()
