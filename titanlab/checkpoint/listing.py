"""The checkpoints of a run as rows: which there are, how large, and whether their bytes are those that were saved."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from titanlab.checkpoint.blocks import BlockReader
from titanlab.checkpoint.contents import damaged, read_contents
from titanlab.checkpoint.damage import DamagedFile
from titanlab.checkpoint.folders import ASIDE, DAMAGED, PART, has_pickle, is_checkpoint
from titanlab.checkpoint.index.format import Index
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


def list_checkpoints(folder: Path, *, verifies: bool) -> list[ListedCheckpoint]:
    """All checkpoints in a run's folder of checkpoints, by step.

    Args:
        verifies: read every byte of those that are complete. Otherwise only index and position are read.
    """
    rows = [row for path in folder.glob("step-*") if (row := _row(path, verifies=verifies)) is not None]
    return sorted(rows, key=lambda row: (row.step, row.name))


def verify(checkpoint: Path, key: str) -> bool:
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


def _row(path: Path, *, verifies: bool) -> ListedCheckpoint | None:
    match = _NAME.fullmatch(path.name)
    state = _STATES.get(match[2]) if match else None
    if match is None or state is None or not path.is_dir() or (state == "complete" and not is_checkpoint(path)):
        return None
    verified: bool | None = None
    problem = None
    if state == "complete":
        try:
            if verifies:
                # Without checksums nothing is known about the bytes.
                verified = verify(path, "run") or None
            else:
                read_contents(path, "run")
        except ConfigError as error:
            state, verified, problem = "damaged", False if verifies else None, error.rule
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
