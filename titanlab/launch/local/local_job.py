"""What the supervisor notes about a job on this host: one file for each, in `submissions/TOKEN/`."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from titanlab.launch.submission import SCHEMA, read_mapping
from titanlab.records.run_folder import RunFolder
from titanlab.system.atomic_file import write_json

# A job of another host counts as alive for as long after the last sign of it.
_HEARD_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class LocalJob:
    """A job on this host.

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


def local_job(sweep: Path, token: str, index: int) -> LocalJob | None:
    """What is noted about a job; None before its turn comes."""
    value = read_mapping(_file(sweep, token, index))
    if value is None:
        return None
    known = {kept.name: value[kept.name] for kept in fields(LocalJob) if kept.name in value}
    return LocalJob(**{**known, "devices": tuple(known.get("devices", ()))})


def write_local_job(sweep: Path, token: str, index: int, job: LocalJob) -> None:
    """Note the state of a job."""
    path = _file(sweep, token, index)
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


def _file(sweep: Path, token: str, index: int) -> Path:
    return sweep / "submissions" / token / f"{index}.json"
