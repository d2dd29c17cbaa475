"""result.json, and the notes of ranks that failed: written for good, also on a disk that has become full."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from titanlab.errors import ConfigError
from titanlab.records.json_file import RESTORE, check_object, read_object
from titanlab.records.outcome import KINDS, SCHEMA, Outcome, from_mapping
from titanlab.system.atomic_file import write_bytes, write_json
from titanlab.system.disk import disk_fault

# Room for the record of an end on a full disk: results with a traceback, twice, and some ranks' notes.
_RESERVE = ".reserve"
_RESERVE_BYTES = 1 << 17


def read_end(path: Path) -> Outcome | None:
    """How something ended; None where there is no such file.

    Raises:
        ConfigError: the file is damaged, or of another version.
    """
    value = read_object(path)
    if value is None:
        return None
    check_object(path, value, schema=SCHEMA, kinds=KINDS)
    try:
        return from_mapping(value)
    except (LookupError, TypeError, ValueError) as error:
        raise ConfigError("kind", value.get("kind"), f"is no end of a run in {path}", RESTORE) from error


def write_end(run: Path, path: Path, outcome: Outcome) -> None:
    """Write how something ended, on a full disk into the room that was reserved.

    Args:
        run: folder of the run, which has the room.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, outcome.to_mapping(), durable=True)
    except OSError as error:
        if disk_fault(error) is None:
            raise
        make_room(run)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, outcome.to_mapping(), durable=True)


def reserve_room(run: Path) -> None:
    """Take the room that the record of an end needs, while there is some.

    Raises:
        OSError: there is none.
    """
    if not (run / _RESERVE).exists():
        # Random bytes, which no file system can compress.
        write_bytes(run / _RESERVE, os.urandom(_RESERVE_BYTES), durable=True)


def make_room(run: Path) -> None:
    """Give back the room that was reserved for the record of an end."""
    with contextlib.suppress(OSError):
        (run / _RESERVE).unlink(missing_ok=True)
