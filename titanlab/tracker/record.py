"""attempts/N/tracker.json: how far a tracker got, so that a run can report what the tracker lacks."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from titanlab.system.atomic_file import write_json

SCHEMA = 1
FILE = "tracker.json"
# Folder in a run's folder: trackers' files from before a rebuild.
REPLACED = "replaced"
# Not ready yet; takes rows; has all rows and the summary.
STARTING, OPEN, FINISHED = "starting", "open", "finished"


@dataclass(frozen=True, kw_only=True)
class Record:
    """What tracker.json holds.

    Attributes:
        kind: option of the group `tracker`.
        state: STARTING, OPEN or FINISHED.
        id: the run's there.
        wanted: the mode that was asked for, `online` or `offline`; None for trackers without modes.
        mode: the mode in use; None before it is ready.
        folder: with its files, below the run's; None before it is ready.
        step: of the latest row that it has taken.
        rows: how many it has taken in this attempt.
        left_out: rows that it was not given because it could not keep up.
        attempt: the attempt, from 1; of a record that was rebuilt, the latest one that is in it.
        rebuilt: whether it was written anew from metrics.jsonl.
        updated: when, in seconds since the epoch.
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


def write_record(path: Path, record: Record) -> None:
    """Replace a record; if the disk is full or absent, the record is unchanged."""
    # A row that cannot be recorded counts as missing. A tracker's trouble never stops the run.
    with contextlib.suppress(OSError):
        write_json(path, {"schema": SCHEMA, **asdict(replace(record, updated=time.time()))})


def read_record(path: Path) -> Record | None:
    """The record in a file; None where there is none, or none of this schema."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(value, Mapping) or value.get("schema") != SCHEMA:
        return None
    known: dict[str, Any] = {each.name: value[each.name] for each in fields(Record) if each.name in value}
    try:
        return Record(**known)
    except TypeError:
        return None
