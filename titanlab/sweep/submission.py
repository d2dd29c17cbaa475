"""What was submitted: one file for each array of jobs, and one for each job that ran on this host.

A submission is written before its jobs are asked for, under a token with which their name in the queue ends. Whoever
finds one without a job's number asks the queue for that token: so nothing is submitted twice, and nothing is lost.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from titanlab.launch.shape import Shape, shape_from
from titanlab.launch.slurm_array import job_name
from titanlab.records.run_folder import RunFolder
from titanlab.system.atomic_file import write_json

SCHEMA = 1
# As long, a job of another host is taken to live after the last word of it.
_HEARD_SECONDS = 60.0
STATES = ("intent", "submitted")


@dataclass(frozen=True, kw_only=True)
class Submission:
    """An array of jobs of one shape; the place of a run in `runs` is its index in the array.

    Attributes:
        token: its own; the name of the jobs ends with it.
        launcher: `local` or `slurm`.
        created: seconds since the epoch.
        state: `intent` before the queue has been asked, `submitted` afterwards.
        job_id: the queue's number of the array; the token on this host; None in an intent.
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


@dataclass(frozen=True, kw_only=True)
class LocalJob:
    """A job on this host: what the supervisor notes about one run of a submission.

    Attributes:
        state: `starting`, `running`, `ended`, or `cancelled` before it started.
        pid: of submitit's controller; None before it is started.
        born: when that process started, as the kernel counts; tells it from a later one of the same number.
        host: where.
        started, ended: seconds since the epoch.
        devices: accelerators that it has for itself.
    """

    state: str
    pid: int | None = None
    born: int | None = None
    host: str = field(default_factory=socket.gethostname)
    started: float | None = None
    ended: float | None = None
    devices: tuple[str, ...] = ()

    @property
    def is_here(self) -> bool:
        """Whether it is a job of this host."""
        return self.host == socket.gethostname()

    def is_alive(self, run: RunFolder) -> bool:
        """Whether the controller runs; of another host's, whether somebody has the run, or it was heard of lately.

        A container or a laptop that has another name now leaves jobs of a host that nobody ever hears of again.
        """
        if self.state != "running":
            return False
        if self.is_here:
            return self.pid is not None and born_at(self.pid) is not None and born_at(self.pid) == self.born
        status = run.known_status()
        heard = status.updated if status is not None and status.state not in ("prepared", "ended") else 0.0
        return run.is_claimed() or time.time() - max(self.started or 0.0, heard) < _HEARD_SECONDS


def submissions(sweep: Path) -> list[Submission]:
    """All of a sweep's folder, oldest first; a file that is none is passed over."""
    found = []
    for path in (sweep / "submissions").glob("*.json"):
        value = _read(path)
        if value is None or value.get("schema") != SCHEMA:
            continue
        kept = {each.name: value[each.name] for each in fields(Submission) if each.name in value}
        read = {"shape": shape_from(value["shape"]), "runs": tuple(value["runs"])}
        found.append(Submission(**{**kept, **read}))
    return sorted(found, key=lambda each: (each.created, each.token))


def write_submission(sweep: Path, submission: Submission) -> None:
    """Note a submission, or replace what is noted; it survives a power cut."""
    assert submission.state in STATES, submission.state
    (sweep / "submissions").mkdir(exist_ok=True)
    write_json(_path(sweep, submission.token), {"schema": SCHEMA, **asdict(submission)}, durable=True)


def drop_submission(sweep: Path, submission: Submission) -> None:
    """Forget an intent that came to nothing; a job that should still come of it finds no submission, and ends."""
    _path(sweep, submission.token).unlink(missing_ok=True)


def local_job(sweep: Path, token: str, index: int) -> LocalJob | None:
    """What is noted about a job on this host; None before its turn comes."""
    value = _read(_local_path(sweep, token, index))
    if value is None:
        return None
    known = {each.name: value[each.name] for each in fields(LocalJob) if each.name in value}
    return LocalJob(**{**known, "devices": tuple(known.get("devices", ()))})


def write_local_job(sweep: Path, token: str, index: int, job: LocalJob) -> None:
    """Note where a job on this host stands."""
    path = _local_path(sweep, token, index)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"schema": SCHEMA, **asdict(job)})


def born_at(pid: int) -> int | None:
    """When a process of this host started, in the kernel's ticks; 0 where that is not told; None for a dead one."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return None
        with contextlib.suppress(OSError):
            os.kill(pid, 0)
            return 0
        return None
    except OSError:
        return None
    # The name, in brackets, may hold anything.
    state, *rest = text.rpartition(")")[2].split()
    return None if state in "ZX" else int(rest[18])


def _path(sweep: Path, token: str) -> Path:
    return sweep / "submissions" / f"{token}.json"


def _local_path(sweep: Path, token: str, index: int) -> Path:
    return sweep / "submissions" / token / f"{index}.json"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
