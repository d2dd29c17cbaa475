"""Looped breadth-first: a rank takes all microbatches through one of its stages before the next (arXiv 2211.05953)."""

from __future__ import annotations

from titanlab.schedule.action import Action, Kind
from titanlab.schedule.looped_bfs_schema import LoopedBFS
from titanlab.schedule.placement import looped, stages_of


def placement(config: LoopedBFS, *, ranks: int) -> list[int]:
    """Rank of each stage."""
    return looped(ranks=ranks, stages_per_rank=config.stages_per_rank)


def check(config: LoopedBFS, *, ranks: int, microbatches: int) -> None:
    """Every number of ranks and microbatches will do."""


def actions(config: LoopedBFS, *, ranks: int, microbatches: int) -> list[list[Action]]:
    """Actions by rank. Backward passes take microbatches in reverse: the last one's activations are the freshest."""
    orders = []
    for rank in range(ranks):
        stages = stages_of(placement(config, ranks=ranks), rank)
        forward = [Action(stage, Kind.FORWARD, each) for stage in stages for each in range(microbatches)]
        # The mirror image, with both halves of the backward pass at once.
        orders.append(forward + [action._replace(kind=Kind.BACKWARD) for action in reversed(forward)])
    return orders
