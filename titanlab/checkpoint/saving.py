"""The steps of a save, which all ranks do together: plan, make the folder, stage, write, publish.

Only planning and staging use the model, so that training may go on while copies are written.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from titanlab.checkpoint.address_schema import Place
from titanlab.checkpoint.folders import (
    PART,
    checkpoints,
    is_checkpoint,
    remove,
    remove_unfinished,
    rename,
    step_of,
)
from titanlab.checkpoint.position import Position, SavedPosition
from titanlab.checkpoint.shards import CheckpointShard, shard_of
from titanlab.checkpoint.writer import HostBuffer, SavePlannerOfJson, Staged, publish, stage, sync_folder, write
from titanlab.distributed.world import World
from titanlab.errors import ConfigError
from titanlab.records.outcome import first_line
from titanlab.system.files import disk_fault

T = TypeVar("T")


def together(world: World, action: Callable[[], T]) -> T:
    """Do an action on this rank, and wait for the others; all ranks call it.

    Raises:
        Exception: an error of this rank, or the error of another one. A ConfigError of any rank is raised on all of
            them, because it is the line that users see.
    """
    value, failure = attempted(action)
    raise_first(world.gather(failure), own=failure)
    return value  # type: ignore[return-value]  # None only if the action returns it.


def attempted(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """The value of an action, or its error in a form that other ranks can receive."""
    try:
        return action(), None
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            # Any exception class may be impossible to pickle, and then no rank would learn of the failure.
            portable = RuntimeError(first_line(error))
            portable.__cause__ = error
            return None, portable
        return None, error


def raise_first(failures: Sequence[Exception | None], *, own: Exception | None = None) -> None:
    """Raise the error that says most about the failures of the ranks; nothing if there are none."""
    known = [failure for failure in failures if failure is not None]
    if not known:
        return
    config_error = next((failure for failure in known if isinstance(failure, ConfigError)), None)
    raise config_error or own or known[0]


@dataclass(kw_only=True)
class PlannedSave:
    """A save that all ranks have agreed on."""

    planner: SavePlannerOfJson
    plan: SavePlan
    rank: int
    folder: Place
    shards: Sequence[CheckpointShard]
    position: SavedPosition = field(default_factory=lambda: SavedPosition(position=Position(), parameters={}, files={}))

    def stage(self, into: HostBuffer | None = None) -> Staged:
        """Take this rank's part from the model; see `writer.stage`."""
        return stage(self.plan, self.planner, self.rank, into)


class Plans:
    """Plans the saves of one run.

    A plan holds as long as names, shapes, formats and cuts of the state stay on every rank, so it is made once: for
    405B parameters on 512 ranks it takes a rank 10 s, and rank 0 minutes (benchmarks/save_planning.py).
    """

    def __init__(self) -> None:
        self._outline: Mapping[str, Any] | None = None
        self._plan: SavePlan | None = None
        self._shards: Sequence[CheckpointShard] = ()

    def plan(self, state: Mapping[str, Any], folder: Place, world: World) -> PlannedSave:
        """Agree with all ranks on who writes what; `dcp.save` does the same at its beginning."""
        planner = SavePlannerOfJson()
        _, failure = attempted(lambda: planner.set_up_planner(dict(state), None, world.logs))
        outline = None if failure else _outline(planner.state_dict)
        if not all(world.gather(outline is not None and outline == self._outline)):
            self._plan, self._shards = _planned_together(planner, world, failure)
            self._outline = outline
        assert self._plan is not None
        plan = planner.finish_plan(self._plan)
        return PlannedSave(planner=planner, plan=plan, rank=world.rank, folder=folder, shards=self._shards)


def _outline(state: Mapping[str, Any]) -> dict[str, Any]:
    """What a plan depends on, by the names of the entries."""
    outline: dict[str, Any] = dict.fromkeys(state)
    for name, value in state.items():
        if isinstance(value, Tensor):
            cut = (value.placements, value.device_mesh) if isinstance(value, DTensor) else None
            outline[name] = (type(value), value.shape, value.dtype, cut)
    return outline


def _planned_together(
    planner: SavePlannerOfJson, world: World, failure: Exception | None
) -> tuple[SavePlan, Sequence[CheckpointShard]]:
    """This rank's part of a new plan of all ranks; on rank 0 also the layouts of all ranks' files.

    Args:
        failure: the error with which this rank could not set up its planner.
    """

    def local() -> SavePlan:
        raise_first([failure])
        return planner.create_local_plan()

    def all_of(gathered: list[tuple[SavePlan | None, Exception | None]]) -> list[SavePlan]:
        raise_first([failure for _, failure in gathered])
        plans, _ = planner.create_global_plan([plan for plan, _ in gathered if plan is not None])
        shards.extend(shard_of(plan, rank) for rank, plan in enumerate(plans))
        return plans

    shards: list[CheckpointShard] = []
    gathered = world.collect(attempted(local))
    answers: list[tuple[SavePlan | None, Exception | None]] = []
    if world.logs:
        plans, error = attempted(lambda: all_of(gathered))
        answers = [(None, error)] * world.world if plans is None else [(plan, None) for plan in plans]
    own, error = world.scatter(answers)
    raise_first([error])
    assert own is not None
    return own, shards


def write_and_publish(staged: Callable[[], Staged], planned: PlannedSave, world: World) -> None:
    """Write every rank's file, then position.json and the index. It does not use the model.

    Args:
        staged: returns this rank's part, or raises the error with which it could not be staged.
    """
    written, own = attempted(lambda: write(staged(), planned.folder))
    # Rank 0 alone: the checksums of a large checkpoint take tens of megabytes.
    everyone = world.collect((written, own))

    def finish() -> None:
        raise_first([failure for _, failure in everyone])
        publish(planned.folder, planned.shards, [part for part, _ in everyone if part is not None], planned.position)

    failure = attempted(finish)[1] if world.logs else None
    raise_first([world.share(failure)], own=own)


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


def give_name(part: Place, final: Place) -> None:
    """Give a checkpoint whose files are all on the disk its name."""
    if part == final:
        return
    # The folder exists if an earlier attempt saved this step and the run was then resumed from an earlier step.
    failure = remove(final)
    if failure is not None:
        raise failure
    rename(part, final)
    if isinstance(final, Path):
        sync_folder(final.parent)


def remove_old(folder: Place, keep: int, keep_every: int, warn: Callable[[str], None]) -> None:
    """Remove all but the newest `keep` checkpoints (0: keep all), and those whose step `keep_every` divides."""
    for old in checkpoints(folder)[:-keep] if keep else []:
        if keep_every and step_of(old) % keep_every == 0:
            continue
        failure = remove(old)
        if failure is not None:
            warn(f"the old checkpoint {old} cannot be removed: {failure.strerror or failure}")
