"""The folder of a checkpoint while it is written: it is made, gets its name, or is removed after an error."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from titanlab.checkpoint.folders import (
    PART,
    checkpoints,
    is_checkpoint,
    remove,
    remove_unfinished,
    rename,
    step_of,
)
from titanlab.checkpoint.remote.address_schema import Place
from titanlab.checkpoint.savers.saving import Planned
from titanlab.checkpoint.writer import sync_folder
from titanlab.distributed.world import World
from titanlab.system.files import disk_fault


@dataclass(frozen=True, kw_only=True)
class Begun:
    """A save that all ranks have begun.

    Attributes:
        planned: what each rank writes.
        part, final: the folder, without and with its name.
    """

    planned: Planned
    part: Place
    final: Place


def make_part(folder: Place, final: Place) -> Place:
    """Make the folder into which all ranks write, and remove what earlier saves have left."""
    remove_unfinished(folder)
    part = final.with_name(final.name + PART)
    if isinstance(part, Path):
        # Without the folder of the run: if that was moved or removed, one made anew would have no records.
        with contextlib.suppress(FileExistsError):
            part.parent.mkdir()
        if not part.parent.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(part.parent))
        part.mkdir()
        return part
    # In a store a rename copies all bytes. The folder counts as a checkpoint only when it has its index.
    return part if is_checkpoint(final) else final


@contextlib.contextmanager
def removed_after_errors(part: Place, world: World) -> Iterator[None]:
    """Inside the block, ranks write into the folder; after an error nothing of it is left."""
    try:
        yield
    except Exception as error:
        # All ranks raise, so no rank is still writing.
        if world.logs:
            # On a full disk the partial files would leave no space for the record of the run's outcome.
            remove(part)
        if isinstance(error, OSError) and disk_fault(error) is not None:
            # The error of a write has no file name.
            error.filename = str(part.parent)
        raise


def publish(begun: Begun) -> None:
    """Give a checkpoint whose files are all on the disk its name."""
    if begun.part == begun.final:
        return
    # The folder exists if an earlier attempt saved this step and the run was then resumed from an earlier step.
    failure = remove(begun.final)
    if failure is not None:
        raise failure
    rename(begun.part, begun.final)
    if isinstance(begun.final, Path):
        sync_folder(begun.final.parent)


def remove_old(folder: Place, keep: int, keep_every: int, warn: Callable[[str], None]) -> None:
    """Remove all but the newest `keep` checkpoints (0: keep all), and those whose step `keep_every` divides."""
    for old in checkpoints(folder)[:-keep] if keep else []:
        if keep_every and step_of(old) % keep_every == 0:
            continue
        failure = remove(old)
        if failure is not None:
            warn(f"the old checkpoint {old} cannot be removed: {failure.strerror or failure}")
