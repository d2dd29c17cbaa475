"""The steps of a save: plan with all ranks, stage what the model holds, write and publish.

Only the first two use the model, so that training may go on while the last one writes copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from titanlab.checkpoint.agreement import attempted, raise_first
from titanlab.checkpoint.remote.address_schema import Place
from titanlab.checkpoint.savers.host_buffer import HostBuffer
from titanlab.checkpoint.shards import Shard
from titanlab.checkpoint.writer import CheckpointWriter, SavePlannerOfJson, Staged, stage, write
from titanlab.distributed.world import World


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A save that all ranks have agreed on.

    Attributes:
        planner: knows where the state is.
        plan: this rank's part.
        writer: of the checkpoint's folder.
    """

    planner: SavePlannerOfJson
    plan: SavePlan
    writer: CheckpointWriter

    def stage(self, into: HostBuffer | None = None) -> Staged:
        """Take this rank's part from the model; see `writer.stage`."""
        return stage(self.plan, self.planner, self.writer.rank, into)


class Plans:
    """Plans the saves of one run.

    A plan holds as long as names, shapes, formats and cuts of the state stay on every rank, so it is made once: for
    405B parameters on 512 ranks it takes a rank 10 s, and rank 0 minutes (benchmarks/save_planning.py).
    """

    def __init__(self) -> None:
        self._last: _LastPlan | None = None

    def plan(self, state: Mapping[str, Any], folder: Place, world: World) -> Planned:
        """Agree with all ranks on who writes what; `dcp.save` does the same at its beginning.

        Args:
            state: nested mappings of tensors and JSON values.
            folder: of the checkpoint; it need not exist yet.
        """
        planner = SavePlannerOfJson()
        writer = CheckpointWriter(folder, world.rank)
        _, failure = attempted(lambda: planner.set_up_planner(dict(state), None, world.logs))
        outline = None if failure else _outline(planner.state_dict)
        last = self._last
        stays = last is not None and last.outline == outline
        if all(world.gather(stays)):
            assert last is not None
            writer.shards = last.shards
            return Planned(planner=planner, plan=planner.finish_plan(last.plan), writer=writer)
        own = _planned_together(planner, writer, world, failure)
        assert outline is not None
        self._last = _LastPlan(outline=outline, plan=own, shards=writer.shards)
        return Planned(planner=planner, plan=planner.finish_plan(own), writer=writer)


@dataclass(frozen=True, kw_only=True)
class _LastPlan:
    """A plan, and what it depends on."""

    outline: Mapping[str, Any]
    plan: SavePlan
    shards: Sequence[Shard]


def _outline(state: Mapping[str, Any]) -> dict[str, Any]:
    """What a plan depends on, by the names of the entries."""
    return {
        name: (type(value), value.shape, value.dtype, _cut(value)) if isinstance(value, Tensor) else None
        for name, value in state.items()
    }


def _cut(tensor: Tensor) -> Any:
    return (tensor.placements, tensor.device_mesh) if isinstance(tensor, DTensor) else None


def _planned_together(
    planner: SavePlannerOfJson, writer: CheckpointWriter, world: World, failure: Exception | None
) -> SavePlan:
    """This rank's part of a new plan of all ranks.

    Args:
        failure: the error with which this rank could not set up its planner.
    """

    def local() -> SavePlan:
        raise_first([failure])
        writer.set_up_storage_writer(world.logs)
        return writer.prepare_local_plan(planner.create_local_plan())

    def all_of(gathered: list[tuple[SavePlan | None, Exception | None]]) -> list[SavePlan]:
        raise_first([failure for _, failure in gathered])
        plans, _ = planner.create_global_plan([plan for plan, _ in gathered if plan is not None])
        return writer.prepare_global_plan(plans)

    gathered = world.collect(attempted(local))
    answers: list[tuple[SavePlan | None, Exception | None]] = []
    if world.logs:
        plans, error = attempted(lambda: all_of(gathered))
        answers = [(None, error)] * world.world if plans is None else [(plan, None) for plan in plans]
    own, error = world.scatter(answers)
    raise_first([error])
    assert own is not None
    return own


def write_and_publish(staged: Callable[[], Staged], writer: CheckpointWriter, world: World) -> None:
    """Write every rank's file, then position.json and the index. It does not use the model.

    Args:
        staged: returns this rank's part, or raises the error with which it could not be staged.
    """
    written, own = attempted(lambda: write(staged(), writer.folder))
    # Rank 0 alone: the checksums of a large checkpoint take tens of megabytes.
    everyone = world.collect((written, own))

    def publish() -> None:
        raise_first([failure for _, failure in everyone])
        writer.publish([part for part, _ in everyone if part is not None])

    failure = attempted(publish)[1] if world.logs else None
    raise_first([world.share(failure)], own=own)
