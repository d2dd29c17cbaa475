"""How long the verbs that read a sweep take for 1,000 finished runs: `status`, `collect`, `best`, and `report`.

Makes the sweep's folder as submitting and running leave it (config, env, identity, status, metrics, result, job
records): 100 recipes of 8 H100 with ten repeats and a control. Figures in the results are random numbers. Nothing is
trained. Each verb is a whole command; the median over the rounds counts. Prints one JSON object; `--write` also keeps
it under benchmarks/results/.

    python benchmarks/thousand_runs.py --write
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from titanlab.cli.verbs import VERBS
from titanlab.costs import meter
from titanlab.launch import Submission, write_submission
from titanlab.recipe import to_mapping
from titanlab.records import Outcome, OutcomeKind, RunFolder, create_run, provenance
from titanlab.sweep import SweepFolder, decide, plan_study
from titanlab.sweep.rows import estimate_values
from titanlab.sweep.submit import Decision
from titanlab.system import write_json

HERE = Path(__file__).parent
NAME = "thousand"
# 5 layouts × 2 precisions × 2 policies × 5 rates, ten times, and eleven runs of the control.
SWEEP = (
    *("model=llama3_8b", "data=synthetic", "world=8", "cluster=h100", "launch=slurm", f"sweep={NAME}"),
    *("optimizer.schedule.warmup_steps=2", "training.steps=30", "training.seq_len=4096", "training.global_batch=32"),
    *("parallelism=fsdp,fsdp_tp,fsdp_pp,fsdp_cp,fsdp_tp_pp", "precision=bf16,float8_tensorwise"),
    *("ac=full,selective_op", "optimizer.lr=1e-4,2e-4,4e-4,8e-4,1.6e-3", "compile=block"),
    *("hydra/sweeper=space", "hydra.sweeper.repeats=10", "hydra.sweeper.control={parallelism: fsdp}"),
)
VERBS_MEASURED = ("status", "collect", "best", "report")
_STEPS = 30


def make(runs: Path) -> int:
    """Make the sweep's folder under `runs`. Returns the number of its runs."""
    study = plan_study([*SWEEP, f"runs={runs}"])
    decisions = decide(study, answered=False)
    sweep, env = SweepFolder(runs / NAME), provenance.collect(launcher="local", devices={}).record
    sweep.path.mkdir(parents=True)
    speeds = random.Random(0)
    points = []
    for place, decision in enumerate(decisions):
        recipe = decision.planned.recipe
        run = create_run(
            runs, sweep=NAME, name=recipe.name, identity=decision.planned.identity, config=to_mapping(recipe)
        )
        _end(run, {**env, "time": 1.8e9 + 100 * place}, speeds, world=recipe.layout.world)
        point = decision.planned.point
        control = {"control": True} if point.is_control else {}
        points.append(
            {"point": dict(point.values), "repeat": point.repeat, "run": run.path.name, "dropped": None}
            | {"estimate": estimate_values(recipe), **control}
        )
    sweep.write_manifest({"name": NAME, "origin": study.origin, **study.definition}, points)
    _submit(sweep, decisions)
    return len(decisions)


def _end(run: RunFolder, env: dict[str, Any], speeds: random.Random, *, world: int) -> None:
    """The run's only attempt, from its start to its end."""
    attempt = run.begin_attempt(run.config(), env)
    speed = 5000 * math.exp(speeds.gauss(0, 0.03))
    with run.open_metrics(attempt) as metrics:
        for step in range(1, _STEPS + 1):
            row = {meter.LOSS: 12.0 - step / 10, meter.GRAD_NORM: 1.0, meter.TOKENS_SEEN: 131072 * step}
            metrics.write("train", step, row | {meter.TOKENS_PER_SECOND: speed, meter.MFU: 40.0})
    summary = {
        meter.TOKENS_PER_SECOND: speed,
        meter.TFLOPS: 400.0,
        meter.MFU: speed / 125,
        meter.STEP_SECONDS: 131072 / speed / world,
        meter.STEP_SECONDS_LOW: 130000 / speed / world,
        meter.STEP_SECONDS_HIGH: 133000 / speed / world,
        meter.MEASURED_STEPS: _STEPS - 3,
        meter.TOKENS_SEEN: 131072 * _STEPS,
        meter.LOSS: 9.0,
        meter.MEMORY_RESERVED: 60.0,
        meter.MEMORY_MOST: 60.0 + speeds.random(),
        meter.MEMORY_MOST_RANK: speeds.randrange(world),
        "flops_convention": "6(N−N_emb)+12·L·H·Q·T",
        "peak_tflops": 989.0,
        "peak_source": "NVIDIA H100 80GB HBM3, dense",
    }
    ended = env["time"] + 90
    run.write_result(
        Outcome(kind=OutcomeKind.DONE, step=_STEPS, steps=_STEPS, attempt=attempt, ended=ended, metrics=summary)
    )


def _submit(sweep: SweepFolder, decisions: list[Decision]) -> None:
    """One array of local jobs, all of which have ended: their attempts name it."""
    runs = tuple(decision.run for decision in decisions)
    shape = decisions[0].shape
    submission = Submission(
        launcher="local", state="submitted", job_id="1", code="code/none", shape=shape, launch={}, runs=runs
    )
    write_submission(sweep.path, submission)
    for index, name in enumerate(runs):
        job = {"token": submission.token, "index": index, "nodes": ["here"], "started": 1.8e9}
        write_json(sweep.run(name).attempt_folder(1) / "job.json", job)


def timed(command: list[str]) -> dict[str, float]:
    """Seconds of the clock and of the processor that a whole command takes; raises an error if it fails."""
    begun, before = time.perf_counter(), os.times()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    after = os.times()
    processor = after.children_user - before.children_user + after.children_system - before.children_system
    return {"seconds": time.perf_counter() - begun, "processor_seconds": processor}


def measure(runs: Path, rounds: int) -> dict[str, dict[str, float]]:
    """The medians of every verb that there is."""
    figures = {}
    for verb in VERBS_MEASURED:
        if verb not in VERBS:
            continue
        command = [sys.executable, "-m", "titanlab", verb, NAME, "--runs", str(runs)]
        taken = [timed(command) for _ in range(rounds)]
        figures[verb] = {name: round(statistics.median(each[name] for each in taken), 2) for name in taken[0]}
    return figures


def main() -> None:
    """Make the folder, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keep", type=Path, help="make the runs in this folder, and keep them")
    parser.add_argument("--write", action="store_true", help="keep the figures under benchmarks/results/")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        runs = (args.keep or Path(temporary)).absolute()
        count = make(runs) if not (runs / NAME).is_dir() else len(SweepFolder(runs / NAME).runs())
        figures = {
            "date": datetime.date.today().isoformat(),
            "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}",
            "runs": count,
            "rounds": args.rounds,
            "verbs": measure(runs, args.rounds),
        }
    text = json.dumps(figures, indent=2)
    print(text)
    if args.write:
        (HERE / "results" / "thousand_runs.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
