"""Interleaved 1F1B: 1F1B over several stages a rank (arXiv 2104.04473, section 2.2)."""

from __future__ import annotations

from titanlab.schedule.action import Action, Kind
from titanlab.schedule.interleaved_1f1b_schema import Interleaved1F1B
from titanlab.schedule.placement import looped, stages_of
from titanlab.schedule.rounds import steps, warm_up


def placement(config: Interleaved1F1B, *, ranks: int) -> list[int]:
    """Rank of each stage."""
    return looped(ranks=ranks, stages_per_rank=config.stages_per_rank)


def check(config: Interleaved1F1B, *, ranks: int, microbatches: int) -> None:
    """Every number of ranks and microbatches will do: see `rounds`."""


def actions(config: Interleaved1F1B, *, ranks: int, microbatches: int) -> list[list[Action]]:
    """Actions by rank."""
    return [_of_rank(config, rank, ranks=ranks, microbatches=microbatches) for rank in range(ranks)]


def _of_rank(config: Interleaved1F1B, rank: int, *, ranks: int, microbatches: int) -> list[Action]:
    stages = stages_of(placement(config, ranks=ranks), rank)
    forward = steps(stages, ranks=ranks, microbatches=microbatches)
    backward = steps(stages[::-1], ranks=ranks, microbatches=microbatches)
    lead = warm_up(rank, ranks=ranks, stages_per_rank=config.stages_per_rank, microbatches=microbatches, per_hop=2)
    order = []
    for step in range(lead + len(backward)):
        if step < len(forward):
            stage, microbatch = forward[step]
            order.append(Action(stage, Kind.FORWARD, microbatch))
        if step >= lead:
            stage, microbatch = backward[step - lead]
            order.append(Action(stage, Kind.BACKWARD, microbatch))
    return order
