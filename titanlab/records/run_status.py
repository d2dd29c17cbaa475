"""status.json: the current state and progress of a run."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from titanlab.errors import ConfigError
from titanlab.records.json_file import check_object, read_object
from titanlab.system.files import write_json

SCHEMA = 1
STATES = ("prepared", "starting", "running", "saving", "ended")
# Types of the keys in JSON; a pair with None may be null.
KINDS: Mapping[str, Any] = {
    "state": str,
    "step": int,
    "steps": (int, None),
    "attempt": int,
    "pid": int,
    "host": str,
    "updated": float,
    "seconds_left": (float, None),
    "outcome": (str, None),
    "metrics": dict,
}


@dataclass(frozen=True, kw_only=True)
class Status:
    """The content of status.json.

    Attributes:
        state: one of STATES.
        step, steps: optimizer steps done, and in all.
        attempt: number of the attempt, from 1; 0 before the first.
        pid, host: the process that wrote the file.
        updated: when it was written, in seconds since the epoch.
        seconds_left: an estimate; None if there is none.
        outcome: the kind of outcome; None before the run has ended.
        metrics: the latest row of metrics.jsonl, so that a table of many runs need not read that file.
    """

    state: str
    step: int = 0
    steps: int | None = None
    attempt: int = 0
    pid: int = field(default_factory=os.getpid)
    host: str = field(default_factory=socket.gethostname)
    updated: float = field(default_factory=time.time)
    seconds_left: float | None = None
    outcome: str | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)


def read_status(path: Path) -> Status | None:
    """The status in a file; None if there is no file.

    Raises:
        ConfigError: the file is damaged, or another version of titanlab wrote it.
    """
    cure = "remove that file: it is written anew when the run goes on"
    value = read_object(path, cure=cure)
    if value is None:
        return None
    check_object(path, value, schema=SCHEMA, kinds=KINDS, cure=cure)
    if value.get("state") not in STATES:
        raise ConfigError("state", value.get("state"), f"is none of {', '.join(STATES)} in {path}", cure)
    known = {field.name for field in fields(Status)}
    return Status(**{key: inner for key, inner in value.items() if key in known})


def write_status(path: Path, status: Status) -> None:
    """Replace the status in a file."""
    if status.state not in STATES:
        raise ValueError(f"{status.state!r} is none of {STATES}")
    write_json(path, {"schema": SCHEMA, **asdict(status)})
