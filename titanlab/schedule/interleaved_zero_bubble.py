"""Interleaved zero bubble: gradients of weights wait for time that would be idle (ZB-H1, arXiv 2401.10241)."""

from __future__ import annotations

from titanlab.schedule.action import Action, Kind
from titanlab.schedule.interleaved_zero_bubble_schema import InterleavedZeroBubble
from titanlab.schedule.placement import looped, stages_of
from titanlab.schedule.rounds import steps, warm_up


def placement(config: InterleavedZeroBubble, *, ranks: int) -> list[int]:
    """Rank of each stage."""
    return looped(ranks=ranks, stages_per_rank=config.stages_per_rank)


def check(config: InterleavedZeroBubble, *, ranks: int, microbatches: int) -> None:
    """Every number of ranks and microbatches will do: see `rounds`."""


def actions(config: InterleavedZeroBubble, *, ranks: int, microbatches: int) -> list[list[Action]]:
    """Actions by rank."""
    return [_of_rank(config, rank, ranks=ranks, microbatches=microbatches) for rank in range(ranks)]


def _of_rank(config: InterleavedZeroBubble, rank: int, *, ranks: int, microbatches: int) -> list[Action]:
    stages = stages_of(placement(config, ranks=ranks), rank)
    forward = steps(stages, ranks=ranks, microbatches=microbatches)
    backward = steps(stages[::-1], ranks=ranks, microbatches=microbatches)
    # A gradient of the input comes back sooner than a whole backward pass: less of a lead is enough.
    lead = warm_up(rank, ranks=ranks, stages_per_rank=config.stages_per_rank, microbatches=microbatches, per_hop=1)
    # A rank's weights lag by its number: the later the rank, the sooner it has gradients, and the longer it idles
    # at the end, where those left over have their place.
    lag = rank
    order = []
    for step in range(lead + len(backward)):
        if step < len(forward):
            stage, microbatch = forward[step]
            order.append(Action(stage, Kind.FORWARD, microbatch))
        if step >= lead:
            stage, microbatch = backward[step - lead]
            order.append(Action(stage, Kind.INPUT, microbatch))
        if step >= lead + lag:
            stage, microbatch = backward[step - lead - lag]
            order.append(Action(stage, Kind.WEIGHT, microbatch))
    done = max(0, len(backward) - lag)
    return order + [Action(stage, Kind.WEIGHT, microbatch) for stage, microbatch in backward[done:]]
