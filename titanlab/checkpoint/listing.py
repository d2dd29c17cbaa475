"""The checkpoints of a run as rows: which there are, how large, and whether their bytes are those that were saved."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from titanlab.checkpoint.blocks import BlockReader
from titanlab.checkpoint.contents import damaged, read_contents
from titanlab.checkpoint.damage import DamagedFile
from titanlab.checkpoint.folders import ASIDE, DAMAGED, INDEX, PART, has_pickle, is_checkpoint, steps_in_store
from titanlab.checkpoint.index.format import Index
from titanlab.checkpoint.remote.address_schema import Place, StorePath
from titanlab.errors import ConfigError

_NAME = re.compile(r"step-([0-9]+)((?:\.[a-z]+)?)(?:-[0-9]+)?")
_STATES = {"": "complete", PART: "unfinished", ASIDE: "put aside", DAMAGED: "damaged"}


@dataclass(frozen=True, kw_only=True)
class ListedCheckpoint:
    """A folder in a run's folder of checkpoints.

    Attributes:
        name: of the folder.
        step: in its name.
        state: `complete`; `unfinished`: its save has not ended; `put aside`: the user has gone back to an earlier
            step; `damaged`.
        format: `safetensors`, or `dcp` for the earlier format, which has no checksums.
        bytes: of its files.
        saved: when it was complete, in seconds since the epoch.
        verified: whether all its bytes were read and are those that were saved; None: they were not read.
        problem: what is wrong with it, in one line; None: nothing is known to be wrong.
    """

    name: str
    step: int
    state: str
    format: str
    bytes: int
    saved: float
    verified: bool | None
    problem: str | None


def list_checkpoints(folder: Place, *, verifies: bool) -> list[ListedCheckpoint]:
    """All checkpoints in a run's folder of checkpoints, by step.

    Args:
        verifies: read every byte of those that are complete. Otherwise only index and position are read.
    """
    if isinstance(folder, StorePath):
        return _rows_in_store(folder, verifies=verifies)
    rows = [row for path in folder.glob("step-*") if (row := _row(path, verifies=verifies)) is not None]
    return sorted(rows, key=lambda row: (row.step, row.name))


def verify(checkpoint: Place, key: str) -> bool:
    """Read a checkpoint and compare every block with its checksum. Returns False if it has no checksums.

    Raises:
        ConfigError: it is damaged, or of a later format.
    """
    entries = read_contents(checkpoint, key).entries
    if not isinstance(entries, Index):
        return False
    for file in entries.files:
        try:
            with BlockReader(checkpoint / file.name, file.size, file.checksums) as reader:
                reader.verify()
        except DamagedFile as error:
            raise damaged(checkpoint, key, error) from error
    return True


def _rows_in_store(folder: StorePath, *, verifies: bool) -> list[ListedCheckpoint]:
    """The checkpoints that have their index; what a save leaves that has not ended is no checkpoint."""
    rows = []
    for name, files in steps_in_store(folder).items():
        match = _NAME.fullmatch(name)
        state = _STATES.get(match[2]) if match else None
        if match is None or state is None or INDEX not in files:
            continue
        verified, problem = _examined(folder / name, verifies=verifies) if state == "complete" else (None, None)
        row = ListedCheckpoint(
            name=name,
            step=int(match[1]),
            state=state if problem is None else "damaged",
            format="safetensors",
            bytes=sum(file.size for file in files.values()),
            saved=max(file.modified for file in files.values()),
            verified=verified,
            problem=problem,
        )
        rows.append(row)
    return sorted(rows, key=lambda row: (row.step, row.name))


def _examined(path: Place, *, verifies: bool) -> tuple[bool | None, str | None]:
    """Whether all bytes are those that were saved (None: not known), and what is wrong."""
    try:
        if verifies:
            # Without checksums nothing is known about the bytes.
            return verify(path, "run") or None, None
        read_contents(path, "run")
    except ConfigError as error:
        return False if verifies else None, error.rule
    return None, None


def _row(path: Path, *, verifies: bool) -> ListedCheckpoint | None:
    match = _NAME.fullmatch(path.name)
    state = _STATES.get(match[2]) if match else None
    if match is None or state is None or not path.is_dir() or (state == "complete" and not is_checkpoint(path)):
        return None
    verified, problem = _examined(path, verifies=verifies) if state == "complete" else (None, None)
    state = state if problem is None else "damaged"
    files = [file.lstat() for file in path.iterdir()]
    return ListedCheckpoint(
        name=path.name,
        step=int(match[1]),
        state=state,
        format="dcp" if has_pickle(path) else "safetensors",
        bytes=sum(file.st_size for file in files),
        saved=path.stat().st_mtime,
        verified=verified,
        problem=problem,
    )
