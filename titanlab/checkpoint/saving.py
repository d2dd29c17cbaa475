"""The steps of a save: plan with all ranks, stage what the model holds, write and publish.

Only the first two use the model, so that training may go on while the last one writes copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan

from titanlab.checkpoint.agreement import attempted, raise_first
from titanlab.checkpoint.savers.host_buffer import HostBuffer
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


def plan(state: Mapping[str, Any], folder: Path, world: World) -> Planned:
    """Agree with all ranks on who writes what; `dcp.save` does the same at its beginning.

    Args:
        state: nested mappings of tensors and JSON values.
        folder: of the checkpoint; it need not exist yet.
    """
    planner = SavePlannerOfJson()
    writer = CheckpointWriter(folder, world.rank)

    def local() -> SavePlan:
        planner.set_up_planner(dict(state), None, world.logs)
        writer.set_up_storage_writer(world.logs)
        return writer.prepare_local_plan(planner.create_local_plan())

    def all_of(gathered: list[tuple[SavePlan | None, Exception | None]]) -> list[SavePlan]:
        raise_first([failure for _, failure in gathered])
        plans, _ = planner.create_global_plan([found for found, _ in gathered if found is not None])
        return writer.prepare_global_plan(plans)

    gathered = world.collect(attempted(local))
    answers: list[tuple[SavePlan | None, Exception | None]] = []
    if world.logs:
        plans, failure = attempted(lambda: all_of(gathered))
        answers = [(None, failure)] * world.world if plans is None else [(found, None) for found in plans]
    own, failure = world.scatter(answers)
    raise_first([failure])
    assert own is not None
    return Planned(planner=planner, plan=planner.finish_plan(own), writer=writer)


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
        writer.publish([found for found, _ in everyone if found is not None])

    failure = attempted(publish)[1] if world.logs else None
    raise_first([world.share(failure)], own=own)
