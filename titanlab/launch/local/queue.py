"""The queue of launch=local: a record for each job in `submissions/TOKEN/`, and the start of the sweep's supervisor.

The supervisor lives on when the process that starts it ends. One that ends again and again before it starts a job is
not started again. Whoever watches a sweep starts its supervisor if none runs: without a limit, that would go on for
ever where it cannot run, because its interpreter is gone, or the snapshot of the code is damaged.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from titanlab.distributed.ranks import MEETING
from titanlab.errors import ConfigError
from titanlab.launch.evidence import printed_lines
from titanlab.launch.submission import SCHEMA, Submission, claim_sweep, jobs_folder, submissions
from titanlab.records.claim import is_claimed
from titanlab.records.json_file import read_optional
from titanlab.records.run_folder import RunFolder
from titanlab.system.files import write_json
from titanlab.system.processes import born_at, stopped_note

STATES = ("starting", "running", "ended", "cancelled")
# A job of another host counts as alive for this time after its last sign of life.
_SIGN_OF_LIFE_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class LocalJob:
    """A job on this host.

    Attributes:
        state: `starting`, `running`, `ended`, or `cancelled` before it started.
        pid: of submitit's controller; None before the controller is started.
        born: start time of that process in kernel ticks; distinguishes it from a later process with the same number.
        host: name of the host that runs the job.
        started, ended: seconds since the epoch.
        devices: accelerators for this job alone.
        cause: why it could not be started, in one line; None if it was, or if that is not known.
    """

    state: str
    pid: int | None = None
    born: int | None = None
    host: str = field(default_factory=socket.gethostname)
    started: float | None = None
    ended: float | None = None
    devices: tuple[str, ...] = ()
    cause: str | None = None

    @property
    def is_here(self) -> bool:
        """Whether this host runs the job."""
        return self.host == socket.gethostname()

    def is_alive(self, run: RunFolder) -> bool:
        """Whether the controller runs; for another host: whether the run is claimed, or was updated recently.

        After a host was renamed (a container, a laptop), the jobs under its old name are never updated again.
        """
        if self.state != "running":
            return False
        if self.is_here:
            return _lives(self.pid, self.born)
        status = run.known_status()
        updated = status.updated if status is not None and status.state not in ("prepared", "ended") else 0.0
        return run.is_claimed() or time.time() - max(self.started or 0.0, updated) < _SIGN_OF_LIFE_SECONDS


def _lives(pid: int | None, born: int | None) -> bool:
    """Whether a process of this host lives, and is not a later one with the same number."""
    return pid is not None and born_at(pid) is not None and born_at(pid) == born


def local_job(sweep: Path, token: str, index: int) -> LocalJob | None:
    """The record of a job; None before the supervisor has handled the job, or if the file is damaged."""
    value = read_optional(_file(sweep, token, index))
    if value is None:
        return None
    values = {known.name: value[known.name] for known in fields(LocalJob) if known.name in value}
    if values.get("state") not in STATES or not all(_is_sound(name, given) for name, given in values.items()):
        return None
    return LocalJob(**{**values, "devices": tuple(values.get("devices", ()))})


def _is_sound(name: str, value: object) -> bool:
    """Whether a field of a record can have a value."""
    if name in ("state", "host"):
        return isinstance(value, str)
    if name == "devices":
        return isinstance(value, list) and all(isinstance(device, str) for device in value)
    if name == "cause":
        return value is None or isinstance(value, str)
    kinds = (int,) if name in ("pid", "born") else (int, float)
    return value is None or type(value) in kinds


def write_local_job(sweep: Path, token: str, index: int, job: LocalJob) -> None:
    """Write the record of a job."""
    path = _file(sweep, token, index)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"schema": SCHEMA, **asdict(job)})


def _file(sweep: Path, token: str, index: int) -> Path:
    return sweep / "submissions" / token / f"{index}.json"


LOG = "supervisor.log"
# So many supervisors in a row may end before one of them has started a job.
MOST_STARTS = 3
_SCHEMA = 1
_FILE = "supervisor.json"
# A supervisor that may have lived longer than this does not count: it was killed, or its host was.
_QUICK_SECONDS = 300.0
_PATIENCE_SECONDS = 1.0
# No file is as large as this.
_MOST_COUNT = 2**62
# Lines that the supervisor itself writes; the others are error messages.
_OWN_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ")


@dataclass(frozen=True, kw_only=True)
class SupervisorStart:
    """A start of a sweep's supervisor; the content of `jobs/supervisor.json`.

    Attributes:
        pid: of its process; None if it is not known.
        born: start time of that process in kernel ticks.
        host: on which it was started.
        started: seconds since the epoch.
        in_vain: how many supervisors before it, in a row, have ended soon and have not changed the state of a job.
        jobs: number of the sweep's jobs by state, just before the start.
        log: size of the supervisor's log, in bytes, just before the start.
    """

    pid: int | None
    born: int | None
    host: str = field(default_factory=socket.gethostname)
    started: float = field(default_factory=time.time)
    in_vain: int = 0
    jobs: Mapping[str, int] = field(default_factory=dict)
    log: int = 0

    @property
    def may_live(self) -> bool:
        """Whether the process lives; true if that cannot be known."""
        if self.host != socket.gethostname():
            return True
        return _lives(self.pid, self.born)


def latest_start(sweep: Path) -> SupervisorStart | None:
    """The latest start of a sweep's supervisor; None if there was none, or if the file is damaged."""
    value = read_optional(jobs_folder(sweep) / _FILE)
    if value is None or value.pop("schema", None) != _SCHEMA:
        return None
    try:
        start = SupervisorStart(**value)
    except TypeError:
        return None
    pids = all(value is None or isinstance(value, int) for value in (start.pid, start.born))
    counts = all(isinstance(value, int) and 0 <= value < _MOST_COUNT for value in (start.in_vain, start.log))
    is_sound = pids and counts and isinstance(start.jobs, dict) and isinstance(start.started, int | float)
    return start if is_sound else None


def note_start(sweep: Path, submitted: Sequence[Submission], *, pid: int | None, in_vain: int, log: int) -> None:
    """Note that a supervisor was started.

    Args:
        pid: of its process; None if it is not known.
        in_vain: see `SupervisorStart`.
        log: size of its log before.
    """
    born = None if pid is None else born_at(pid)
    start = SupervisorStart(pid=pid, born=born, in_vain=in_vain, jobs=_jobs_by_state(sweep, submitted), log=log)
    # On a full disk, or in the folder of another user, starts are not counted.
    with contextlib.suppress(OSError):
        write_json(jobs_folder(sweep) / _FILE, {"schema": _SCHEMA, **asdict(start)})


def starts_in_vain(sweep: Path, submitted: Sequence[Submission]) -> int:
    """How many supervisors in a row have ended soon and have not changed the state of a job."""
    last = latest_start(sweep)
    if last is None or last.jobs != _jobs_by_state(sweep, submitted):
        return 0
    if last.may_live:
        return last.in_vain
    return last.in_vain + 1 if time.time() - last.started < _QUICK_SECONDS else 0


def give_up(sweep: Path, submitted: Sequence[Submission]) -> None:
    """Record that the jobs that wait have failed, because no supervisor lives long enough to start them."""
    cause = f"could not be started: the sweep's supervisor ended {MOST_STARTS} times before it started a job"
    if (error := last_error(sweep)) is not None:
        cause += f"; {LOG} ends with: {error}"
    # If another process has the claim, the next one that watches the sweep does this.
    with contextlib.suppress(ConfigError), claim_sweep(sweep, patience_seconds=_PATIENCE_SECONDS):
        for submission in submitted:
            for index, name in enumerate(submission.runs):
                job = local_job(sweep, submission.token, index)
                if _waits(job) and not RunFolder(sweep / name).is_claimed():
                    now = time.time()
                    ended = LocalJob(state="ended", started=now, ended=now, cause=cause)
                    write_local_job(sweep, submission.token, index, ended)


def why_none(sweep: Path) -> str | None:
    """Why a sweep has no supervisor, in one line; None if the latest one may live, or if there was none.

    The caller knows that nobody holds the supervisor's lock.
    """
    last = latest_start(sweep)
    if last is None or last.may_live:
        return None
    error = last_error(sweep)
    return "its supervisor has ended" if error is None else f"its supervisor has ended: {error}"


def why_stopped(sweep: Path) -> str | None:
    """Which supervisor starts no job because it is stopped (SIGSTOP); None if that is not known."""
    last = latest_start(sweep)
    if last is None or last.pid is None or last.host != socket.gethostname() or not last.may_live:
        return None
    note = stopped_note(last.pid)
    return f"its supervisor, process {last.pid}, {note}" if note else None


def _waits(job: LocalJob | None) -> bool:
    return job is None or (job.state == "starting" and job.pid is None)


def _jobs_by_state(sweep: Path, submitted: Sequence[Submission]) -> dict[str, int]:
    jobs: list[Any] = [
        local_job(sweep, submission.token, index) for submission in submitted for index in range(len(submission.runs))
    ]
    # A job that was about to start when its supervisor died has not started.
    return dict(Counter("waiting" if _waits(job) else job.state for job in jobs))


def last_error(sweep: Path) -> str | None:
    """The last line of the log since the latest start that a supervisor has not written itself; None: there is none."""
    last = latest_start(sweep)
    lines = printed_lines(jobs_folder(sweep) / LOG, begin=0 if last is None else last.log)
    return next((line for line in reversed(lines) if _OWN_LINE.match(line) is None), None)


KIND = "local"
# The lock that the sweep's supervisor holds.
LOCK = ".supervisor"


def local_submissions(sweep: Path) -> list[Submission]:
    """The sweep's submissions to this launcher, oldest first."""
    return [submission for submission in submissions(sweep) if submission.launcher == KIND]


def has_work(sweep: Path) -> bool:
    """Whether a job of the sweep waits on this host, or has started and not ended."""
    for submission in local_submissions(sweep):
        for index in range(len(submission.runs)):
            job = local_job(sweep, submission.token, index)
            if job is None or job.state in ("starting", "running"):
                return True
    return False


def wake(sweep: Path) -> bool:
    """Start the sweep's supervisor if there is work and none runs. Returns whether it was started.

    A running supervisor reads new submissions: before it ends, it claims the sweep and looks for them once more. After
    several that have ended before they started a job, none is started, and the jobs that wait have failed.
    """
    if is_claimed(sweep, file=LOCK) or not has_work(sweep):
        return False
    submitted = local_submissions(sweep)
    in_vain = starts_in_vain(sweep, submitted)
    if is_claimed(sweep, file=LOCK):
        # One that was started at the same time as the latest one has got the lock meanwhile.
        return False
    if in_vain >= MOST_STARTS:
        give_up(sweep, submitted)
        return False
    newest = submitted[-1]
    jobs_folder(sweep).mkdir(exist_ok=True)
    log = jobs_folder(sweep) / LOG
    size = log.stat().st_size if log.exists() else 0
    command = [sys.executable, "-P", "-m", "titanlab.launch.local.supervisor", str(sweep)]
    environment = {**os.environ, **python_environment(sweep, newest)}
    # The shell ends at once, so that the supervisor has no parent that waits for it, and no terminal.
    shell = subprocess.run(
        ["sh", "-c", 'exec "$@" < /dev/null >> "$0" 2>&1 & echo $!', str(log), *command],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={name: value for name, value in environment.items() if name not in MEETING},
    )
    pid = int(shell.stdout) if shell.stdout.strip().isdecimal() else None
    note_start(sweep, submitted, pid=pid, in_vain=in_vain, log=size)
    return True


def python_environment(sweep: Path, submission: Submission) -> dict[str, str]:
    """Environment variables with which Python imports a submission's snapshot before the user's own PYTHONPATH."""
    own = submission.environment(sweep)
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    others = [path for path in inherited if path and not path.startswith(str(sweep / "code") + os.sep)]
    return {**own, "PYTHONPATH": os.pathsep.join([own["PYTHONPATH"], *others])}
