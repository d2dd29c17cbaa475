"""The supervisor's record of a job on this host: one file per job, in `submissions/TOKEN/`."""

from __future__ import annotations

import socket
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from titanlab.launch.submission import SCHEMA, read_mapping
from titanlab.records.run_folder import RunFolder
from titanlab.system.files import write_json
from titanlab.system.processes import born_at

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
            return self.pid is not None and born_at(self.pid) is not None and born_at(self.pid) == self.born
        status = run.known_status()
        updated = status.updated if status is not None and status.state not in ("prepared", "ended") else 0.0
        return run.is_claimed() or time.time() - max(self.started or 0.0, updated) < _SIGN_OF_LIFE_SECONDS


def local_job(sweep: Path, token: str, index: int) -> LocalJob | None:
    """The record of a job; None before the supervisor has handled the job, or if the file is damaged."""
    value = read_mapping(_file(sweep, token, index))
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
