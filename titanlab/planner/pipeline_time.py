"""The time of a pipeline's step: the simulation of its schedule, or an estimate from a shorter one."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from titanlab.planner.model_facts import Key
from titanlab.schedule.action import Kind
from titanlab.schedule.timeline import Durations, simulate

# The ratio of backward to forward, and the part of the backward for weights, are rounded to this step for the cache of
# shorter simulations.
_STEP = 0.05
# Microbatches of a shorter simulation, for each rank.
_ROUNDS = 3


class StageTime(NamedTuple):
    """Seconds of one stage for one microbatch: forward, gradients of inputs, gradients of weights."""

    forward: float
    inputs: float
    weights: float


class PipelineTime(NamedTuple):
    """Seconds of a step: all of it, and what the busiest rank computes."""

    seconds: float
    busy: float


def pipeline_time(
    schedule: Key, stages: Sequence[StageTime], *, ranks: int, microbatches: int, transfer: float, simulated: bool
) -> PipelineTime:
    """Time of all microbatches.

    Args:
        schedule: config of the schedule.
        stages: by stage.
        transfer: time to send a tensor from one rank to another.
        simulated: simulate every action with the times of its stage. False: simulate few microbatches through equal
            stages once for all recipes with similar ratios, and add the others at the pace of the busiest rank.
    """
    placement = _placement(schedule, ranks)
    by_rank = [0.0] * ranks
    for stage, rank in enumerate(placement):
        by_rank[rank] += sum(stages[stage])
    busy = max(by_rank)
    if simulated:
        orders = schedule.value.actions(ranks=ranks, microbatches=microbatches)
        timeline = simulate(orders, placement, _durations(stages), transfer=transfer)
        return PipelineTime(timeline.duration, busy * microbatches)
    mean = sum(by_rank) / len(stages)
    weights = sum(stage.weights for stage in stages) / len(stages) / mean
    forward = sum(stage.forward for stage in stages) / len(stages) / mean
    few = shorter(ranks, microbatches)
    units, hops = _short(schedule, ranks, few, round(forward / _STEP), round(weights / _STEP))
    # The bubble is as long as stages of the mean length make it; in the steady state the busiest rank sets the pace.
    bubble = (units - few * len(placement) / ranks) * mean
    return PipelineTime(bubble + busy * microbatches + hops * transfer, busy * microbatches)


def shorter(ranks: int, microbatches: int) -> int:
    """Number of microbatches of a shorter simulation, with as many left over from rounds as the recipe has."""
    least = _ROUNDS * ranks
    return microbatches if microbatches < least + ranks else least + microbatches % ranks


@functools.lru_cache(maxsize=4096)
def _placement(schedule: Key, ranks: int) -> tuple[int, ...]:
    return tuple(schedule.value.placement(ranks=ranks))


@functools.lru_cache(maxsize=4096)
def _short(schedule: Key, ranks: int, microbatches: int, forward: int, weights: int) -> tuple[float, float]:
    """Duration of a step in units of a stage's mean time, and the number of transfers that it waits for."""
    orders = schedule.value.actions(ranks=ranks, microbatches=microbatches)
    placement = _placement(schedule, ranks)
    ahead = forward * _STEP
    late = min(weights * _STEP, 1 - ahead)
    stages = [StageTime(ahead, 1 - ahead - late, late)] * len(placement)
    without = simulate(orders, placement, _durations(stages)).duration
    small = 1e-3
    with_transfers = simulate(orders, placement, _durations(stages), transfer=small).duration
    return without, (with_transfers - without) / small


def _durations(stages: Sequence[StageTime]) -> Durations:
    return {
        Kind.FORWARD: [stage.forward for stage in stages],
        Kind.BACKWARD: [stage.inputs + stage.weights for stage in stages],
        Kind.INPUT: [stage.inputs for stage in stages],
        Kind.WEIGHT: [stage.weights for stage in stages],
    }
