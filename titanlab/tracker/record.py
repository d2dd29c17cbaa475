"""attempts/N/tracker.json: the rows that a tracker has taken, so that a run can report those that it lacks."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from titanlab.system.files import read_text, write_json

SCHEMA = 1
FILE = "tracker.json"
# With several trackers, each has a record of its own, tracker-KIND.json.
_FILES = "tracker*.json"
# Folder in a run's folder for the tracker files that a rebuild has replaced.
REPLACED = "replaced"
_WHOLE_NUMBERS = ("step", "rows", "left_out", "attempt")
# States of a tracker: not ready yet; takes rows; has all rows and the summary.
STARTING, OPEN, FINISHED = "starting", "open", "finished"


@dataclass(frozen=True, kw_only=True)
class Record:
    """The content of tracker.json.

    Attributes:
        kind: option of the group `tracker`.
        state: STARTING, OPEN or FINISHED.
        id: the run's id in the tracker.
        wanted: the configured mode, `online` or `offline`; None for trackers without modes.
        mode: the mode in use; None before the tracker is ready.
        folder: the folder of the tracker's files, relative to the run's folder; None before the tracker is ready.
        step: of the latest row that the tracker has taken.
        rows: number of rows that the tracker has taken in this attempt.
        left_out: number of rows that were not sent because the tracker could not keep up.
        attempt: number of the attempt, from 1; of a rebuilt record, the latest attempt in it.
        rebuilt: whether the tracker's files were rebuilt from metrics.jsonl.
        updated: time of the last change, in seconds since the epoch.
    """

    kind: str
    state: str = STARTING
    id: str = ""
    wanted: str | None = None
    mode: str | None = None
    folder: str | None = None
    step: int | None = None
    rows: int = 0
    left_out: int = 0
    attempt: int = 1
    rebuilt: bool = False
    updated: float = field(default_factory=time.time)


def file_of(kind: str) -> str:
    """Name of a tracker's record where a run has several trackers."""
    return f"tracker-{kind}.json"


def records_in(folder: Path) -> dict[str, Record]:
    """The records in the folder of an attempt, or of a run, by kind of tracker."""
    records = (read_record(path) for path in sorted(folder.glob(_FILES)))
    return {record.kind: record for record in records if record is not None}


def write_record(path: Path, record: Record) -> None:
    """Replace a record; if the disk is full or absent, the record stays as it is."""
    # A row that is not recorded counts as missing. An error of a tracker never stops the run.
    with contextlib.suppress(OSError):
        write_json(path, {"schema": SCHEMA, **asdict(replace(record, updated=time.time()))})


def read_record(path: Path) -> Record | None:
    """Read a record; None if there is none, if its schema differs, or if a value is of another kind."""
    try:
        value = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(value, Mapping) or value.get("schema") != SCHEMA:
        return None
    known: dict[str, Any] = {field.name: value[field.name] for field in fields(Record) if field.name in value}
    if "kind" not in known or not all(_is_sound(name, value) for name, value in known.items()):
        return None
    return Record(**known)


def _is_sound(name: str, value: Any) -> bool:
    """Whether a field of a record can have a value."""
    if name in _WHOLE_NUMBERS:
        return (type(value) is int and value >= 0) or (value is None and name == "step")
    if name == "rebuilt":
        return isinstance(value, bool)
    if name == "updated":
        return type(value) in (int, float)
    return isinstance(value, str) or (value is None and name in ("wanted", "mode", "folder"))
