"""The memory that a rank takes from its device: of its tensors, of the allocator, and of the process itself."""

from __future__ import annotations

from titanlab.costs.step import Coordinate
from titanlab.costs.traffic_account import step_traffic
from titanlab.planner.machine import Machine
from titanlab.planner.memory import RankMemory
from titanlab.recipe.communication import step_of
from titanlab.recipe.recipe import Recipe


def reserved_bytes(recipe: Recipe, machine: Machine, memory: RankMemory) -> int:
    """Bytes that a rank of a resolved recipe takes from its device.

    Args:
        memory: of that rank.
    """
    own = memory.reserved(machine.allocator_excess, machine.process_bytes)
    return own + message_bytes(recipe, machine, memory.rank)


def message_bytes(recipe: Recipe, machine: Machine, pipeline: int) -> int:
    """Bytes that the messages of a rank leave in its process.

    Args:
        pipeline: its rank on that axis.
    """
    if machine.message_excess == 0:
        return 0
    return round(machine.message_excess * exchanged_bytes(recipe, pipeline))


def exchanged_bytes(recipe: Recipe, pipeline: int) -> float:
    """Bytes of the tensors that a rank sends or receives for one microbatch.

    The heap of a process keeps their buffers: they are freed in another order than they were made.

    Args:
        pipeline: its rank on that axis.
    """
    if recipe.layout.world == 1:
        return 0.0
    rows = step_traffic(step_of(recipe), Coordinate(pipeline=pipeline))
    return sum(row.bytes for row in rows) / recipe.microbatches
