"""A sweep's folder as submitting and running leave it, made in milliseconds: no process is started."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from tests import tiny
from titanlab.costs import meter
from titanlab.launch import JobShape, JobState, Submission, write_submission
from titanlab.recipe import to_mapping
from titanlab.records import Outcome, OutcomeKind, RunFolder, Status, create_run, identify
from titanlab.sweep import SweepFolder

SUMMARY = {
    meter.TOKENS_PER_SECOND: 1000.0,
    meter.TFLOPS: 0.5,
    meter.MFU: 41.5,
    meter.STEP_SECONDS: 0.25,
    meter.DATA_PERCENT: 0.5,
    meter.MEASURED_STEPS: 7,
    meter.TOKENS_SEEN: 3840,
    meter.TRAIN_SECONDS: 2.5,
    meter.PAUSED_SECONDS: 0.5,
    "flops_per_token": 1e6,
    "first_loss": 5.5,
    meter.LOSS: 4.25,
    meter.VALIDATION_LOSS: None,
    "memory/max_resident(GiB)": 0.75,
}


def word(state: str, raw: str | None = None, reason: str | None = None) -> JobState:
    """What a scheduler says of a job."""
    return JobState(state=state, raw=raw, reason=reason)


class Made:
    """A sweep in the making: `made.run("fsdp", shard=2)` adds a run, `made.drop(…)` a point, `made.finish()` writes.

    Args:
        runs: the folder of all runs.
    """

    def __init__(self, runs: Path, name: str = "layouts") -> None:
        self.folder = SweepFolder(runs / name)
        self.points: list[dict[str, Any]] = []

    def run(self, name: str, *, point: dict[str, Any] | None = None, repeat: int = 0, **given: Any) -> RunFolder:
        """Another run, prepared; its recipe is `tiny.recipe`'s with some keys given."""
        recipe = dataclasses.replace(
            tiny.recipe(self.folder.path.parent, **given), name=name, sweep=self.folder.name, repeat=repeat
        )
        identity = identify(recipe, data="tiny", hardware="cpu", repeat=repeat)
        run = create_run(recipe.runs, sweep=recipe.sweep, name=name, identity=identity, config=to_mapping(recipe))
        identity_file = run.path / "identity.json"
        identity_file.write_text(json.dumps({**json.loads(identity_file.read_text()), "created": 1000.0}))
        point = {"parallelism": name} if point is None else point
        self.points.append({"point": point, "repeat": repeat, "run": run.path.name, "dropped": None})
        self.write()
        return run

    def drop(self, stage: str, reason: str, **point: Any) -> None:
        """Another point, which came to no run."""
        self.points.append({"point": point, "repeat": 0, "run": None, "dropped": {"stage": stage, "reason": reason}})
        self.write()

    def write(self) -> None:
        self.folder.path.mkdir(parents=True, exist_ok=True)
        self.folder.write_manifest({"name": self.folder.name}, self.points)

    def submit(self, *runs: RunFolder, launcher: str = "slurm", job_id: str | None = "12", **given: Any) -> Submission:
        """Hand runs over, as one array."""
        shape = JobShape(
            processes=1, nodes=1, tasks_per_node=1, cpus_per_task=None, gpus_per_node=0, memory_gib=None, minutes=None
        )
        submitted = Submission(
            launcher=launcher,
            state="submitted",
            job_id=job_id,
            code="code/abc",
            shape=shape,
            runs=tuple(run.path.name for run in runs),
            **{"launch": {}, **given},
        )
        write_submission(self.folder.path, submitted)
        return submitted


def begin(
    run: RunFolder, *, cores: int = 2, code: str = "c0de", job: dict[str, Any] | None = None, **changed: Any
) -> int:
    """The next attempt, as its first process leaves it; `changed`: keys of the recipe that are other than the run's."""
    env = {
        "time": 1000.0,
        "launcher": "local",
        "code": {"fingerprint": code},
        "host": {"name": "host1.example.org", "usable_cores": cores},
    }
    attempt = run.begin_attempt({**run.config(), **changed}, env)
    if job is not None:
        (run.attempt_folder(attempt) / "job.json").write_text(json.dumps(job))
    return attempt


def train(run: RunFolder, *, step: int = 4, losses: list[float] | None = None, **given: Any) -> None:
    """The run is under way: metrics up to a step, and a status."""
    attempt = max(run.attempts())
    losses = [5.5 - 0.25 * number for number in range(step)] if losses is None else losses
    with run.open_metrics(attempt) as metrics:
        for number, loss in enumerate(losses, 1):
            row = {meter.LOSS: loss, meter.TOKENS_SEEN: 384 * number, meter.TOKENS_PER_SECOND: 900.0}
            row[meter.STEP_SECONDS_MEDIAN] = 0.3
            metrics.write("train", number, row)
    status = {"state": "running", "step": step, "steps": 10, "attempt": attempt, "seconds_left": 75.0, **given}
    run.write_status(Status(metrics=row, **status))


def end(run: RunFolder, kind: str = "done", *, metrics: dict[str, Any] | None = None, **given: Any) -> None:
    """The latest attempt has ended."""
    word = OutcomeKind(kind)
    done = word is OutcomeKind.DONE
    summary = (SUMMARY if done else {}) if metrics is None else metrics
    values = {"step": 10 if done else 4, "steps": 10, "attempt": max(run.attempts()), "ended": 2000.0, **given}
    run.write_result(Outcome(kind=word, metrics=summary, **values))
