"""result.json and the failure notes of ranks: synced to disk, and written even if the disk is full."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from pathlib import Path

from titanlab.errors import ConfigError, TitanlabError
from titanlab.records.json_file import RESTORE, check_object, read_object
from titanlab.records.outcome import KINDS, SCHEMA, Outcome, from_mapping
from titanlab.system.files import FolderGone, disk_fault, home, write_bytes, write_json

# A file that is deleted to free space on a full disk: enough for two results with a traceback and some ranks' notes.
_RESERVE = ".reserve"
_RESERVE_BYTES = 1 << 17


def read_end(path: Path) -> Outcome | None:
    """The outcome in a file; None if there is no file.

    Raises:
        ConfigError: the file is damaged, or another version of titanlab wrote it.
    """
    value = read_object(path)
    if value is None:
        return None
    check_object(path, value, schema=SCHEMA, kinds=KINDS)
    try:
        return from_mapping(value)
    except (TitanlabError, LookupError, TypeError, ValueError) as error:
        raise ConfigError("kind", value.get("kind"), f"is no end of a run in {path}", RESTORE) from error


def write_end(run: Path, path: Path, outcome: Outcome) -> None:
    """Write an outcome; on a full disk, free the reserved space first.

    Args:
        run: folder of the run, which has the reserved space.

    Raises:
        FolderGone: the run's folder was moved or removed. One made anew would have the end, and not the run.
    """
    if not run.is_dir():
        raise FolderGone(str(run))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, outcome.to_mapping(), durable=True)
    except OSError as error:
        if disk_fault(error) is None:
            raise
        make_room(run)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, outcome.to_mapping(), durable=True)


def write_elsewhere(run: Path, outcome: Outcome) -> Path | None:
    """Write an outcome outside of the run's folder, which takes none. Returns the file; None if no folder takes it."""
    for folder in filter(None, (Path(tempfile.gettempdir()), home())):
        path = folder / f"titanlab-{run.name}-attempt-{outcome.attempt}-{secrets.token_hex(3)}-result.json"
        with contextlib.suppress(OSError):
            write_json(path, outcome.to_mapping(), durable=True)
            return path
    return None


def reserve_room(run: Path) -> None:
    """Reserve the disk space that writing an outcome needs.

    Raises:
        OSError: the disk is full.
    """
    if not (run / _RESERVE).exists():
        # Random bytes: a file system that compresses could store zeros in no space.
        write_bytes(run / _RESERVE, os.urandom(_RESERVE_BYTES), durable=True)


def make_room(run: Path) -> None:
    """Free the space that `reserve_room` has taken."""
    with contextlib.suppress(OSError):
        (run / _RESERVE).unlink(missing_ok=True)
