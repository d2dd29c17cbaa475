"""What was submitted: one file for each array of jobs, in `submissions/` of the sweep's folder.

A submission is written before its jobs are asked for, under a token with which their name in the queue ends. Whoever
finds one without a job's number asks the queue for that token: so nothing is submitted twice, and nothing is lost.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from titanlab.launch.shape import Shape, shape_from
from titanlab.records.claim import claimed
from titanlab.system.atomic_file import write_json

SCHEMA = 1
STATES = ("intent", "submitted")
# A lock in the sweep's folder: held by every call that hands jobs over, which may outlive the process that made it.
HANDING_OVER = ".sbatch"
# A submission of many runs takes some seconds.
_CLAIM_SECONDS = 60.0
# Lists of names end at commas; other characters may have a meaning to a shell or a file system.
_UNSAFE = re.compile(r"[^A-Za-z0-9._+/-]")


@dataclass(frozen=True, kw_only=True)
class Submission:
    """An array of jobs of one shape; the place of a run in `runs` is its index in the array.

    Attributes:
        token: its own; the name of the jobs ends with it.
        launcher: its kind.
        created: seconds since the epoch.
        state: `intent` before the queue has been asked, `submitted` afterwards.
        job_id: the scheduler's number of the jobs; None in an intent.
        code: folder of the code that the jobs run, below the sweep's.
        folder: where it was submitted from; relative paths in recipes start there.
        shape: what each of the jobs takes.
        launch: the launcher's config, as plain values.
        runs: folders of the runs, by index.
    """

    token: str = field(default_factory=lambda: secrets.token_hex(5))
    launcher: str
    created: float = field(default_factory=time.time)
    state: str = "intent"
    job_id: str | None = None
    code: str
    folder: str = field(default_factory=os.getcwd)
    shape: Shape
    launch: Mapping[str, Any]
    runs: tuple[str, ...]

    def job_name(self, sweep: str, index: int | None = None) -> str:
        """What the jobs are called in the queue.

        Args:
            sweep: its name.
            index: of one of the runs; None: what all jobs are called until they start.
        """
        run = self.runs[index or 0] if index is not None or len(self.runs) == 1 else None
        return job_name(sweep, run, self.token)

    def command(self, sweep: Path, index: int | None = None) -> list[str]:
        """What every task of a job runs, as words for the interpreter.

        Args:
            sweep: its folder.
            index: of the job; None: each task finds its own (`Launcher.place_in`).
        """
        # -P: a clone that happens to be the current folder must not win over the snapshot.
        words = ["-P", "-m", "titanlab.launch.job.task", str(sweep), self.token]
        return words if index is None else [*words, str(index)]

    def environment(self, sweep: Path) -> dict[str, str]:
        """Variables with which Python finds the code of the jobs first, and does not search the current folder."""
        return {"PYTHONPATH": str(sweep / self.code), "PYTHONSAFEPATH": "1"}


def submissions(sweep: Path) -> list[Submission]:
    """All of a sweep's folder, oldest first; a file that is none is passed over."""
    read = []
    for path in (sweep / "submissions").glob("*.json"):
        value = read_mapping(path)
        if value is None or value.get("schema") != SCHEMA:
            continue
        kept = {known.name: value[known.name] for known in fields(Submission) if known.name in value}
        converted = {"shape": shape_from(value["shape"]), "runs": tuple(value["runs"])}
        read.append(Submission(**{**kept, **converted}))
    return sorted(read, key=lambda submission: (submission.created, submission.token))


def write_submission(sweep: Path, submission: Submission) -> None:
    """Note a submission, or replace what is noted; it survives a power cut."""
    assert submission.state in STATES, submission.state
    (sweep / "submissions").mkdir(exist_ok=True)
    write_json(submission_file(sweep, submission.token), {"schema": SCHEMA, **asdict(submission)}, durable=True)


def drop_submission(sweep: Path, submission: Submission) -> None:
    """Forget an intent that came to nothing; a job that should still come of it finds no submission, and ends."""
    submission_file(sweep, submission.token).unlink(missing_ok=True)


def submission_file(sweep: Path, token: str) -> Path:
    """The file of a submission."""
    return sweep / "submissions" / f"{token}.json"


def claim_sweep(sweep: Path, *, patience_seconds: float = _CLAIM_SECONDS) -> AbstractContextManager[None]:
    """Hold a sweep's folder for this process, which submits, retries or cancels; waits for another one that does.

    Raises:
        ConfigError: it holds on for longer than that.
    """
    return claimed(sweep, "sweep", patience_seconds=patience_seconds)


def jobs_folder(sweep: Path) -> Path:
    """Batch files of a sweep, and what the tasks of its jobs print."""
    return sweep / "jobs"


def job_name(sweep: str, run: str | None, token: str) -> str:
    """What jobs are called in the queue: `SWEEP/RUN-TOKEN`, or `SWEEP-TOKEN` for several runs.

    Slurm's accounting keeps 255 characters.
    """
    shown = sweep[:100] if run is None else f"{sweep[:100]}/{run[:110]}"
    return f"{_UNSAFE.sub('_', shown)}-{token}"


def token_of(name: str) -> str:
    """The token at the end of a job's name; older jobs are called `titanlab-TOKEN`."""
    return name.rpartition("-")[2]


def read_mapping(path: Path) -> dict[str, Any] | None:
    """The mapping in a JSON file; None where there is none that can be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
