"""The time of a pipeline's step: the simulation of its schedule, or an estimate from a shorter one."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from titanlab.planner.actions import actions_of
from titanlab.planner.model_facts import Key
from titanlab.schedule.action import Action, Kind
from titanlab.schedule.order import executed
from titanlab.schedule.timeline import Durations, simulate

# Times of stages are rounded to this share of their mean, so that recipes with similar stages share a simulation.
_ROUNDING = 0.01
# Microbatches of a shorter simulation, for each rank: the steady state is reached.
_ROUNDS = 2
# Time of a transfer, in units of a stage's mean time, with which transfers on the longest path are counted.
_SMALL = 1e-4


_KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)


class StageTime(NamedTuple):
    """Seconds of one stage for one microbatch: forward, gradients of inputs, gradients of weights."""

    forward: float
    inputs: float
    weights: float


class PipelineTime(NamedTuple):
    """Seconds of a step, and those that it has because sending takes time."""

    seconds: float
    sending: float


@dataclass(frozen=True, kw_only=True)
class Stages:
    """The stages of a pipeline, and sums over them.

    Attributes:
        stages: times by stage.
        placement: rank of each stage.
        busy: time of the busiest rank for one microbatch.
        busiest: number of that rank.
        mean: time of a stage for one microbatch.
        rounded: times by stage in units of `_ROUNDING` · mean.
    """

    stages: tuple[StageTime, ...]
    placement: tuple[int, ...]
    busy: float
    busiest: int
    mean: float
    rounded: tuple[StageTime, ...]


def stages_of(stages: Sequence[StageTime], placement: Sequence[int], *, ranks: int) -> Stages:
    """Sums over the stages of a pipeline."""
    by_rank = [0.0] * ranks
    for stage, rank in enumerate(placement):
        by_rank[rank] += sum(stages[stage])
    mean = sum(by_rank) / len(stages)
    unit = _ROUNDING * mean
    return Stages(
        stages=tuple(stages),
        placement=tuple(placement),
        busy=max(by_rank),
        busiest=by_rank.index(max(by_rank)),
        mean=mean,
        rounded=tuple(StageTime(*(round(part / unit) for part in stage)) for stage in stages),
    )


def pipeline_time(
    schedule: Key, stages: Stages, *, ranks: int, microbatches: int, transfer: float, simulated: bool
) -> PipelineTime:
    """Time of all microbatches.

    Args:
        schedule: config of the schedule.
        transfer: time to send a tensor from one rank to another.
        simulated: simulate every action with the times of its stage. False: simulate few microbatches once for all
            recipes with similar stages, and add the others at the pace that these reach.
    """
    if simulated:
        orders = schedule.value.actions(ranks=ranks, microbatches=microbatches)
        durations = _durations(stages.stages)
        whole = simulate(orders, stages.placement, durations, transfer=transfer).duration
        without = simulate(orders, stages.placement, durations).duration if transfer else whole
        return PipelineTime(whole, whole - without)
    few = shorter(ranks, microbatches)
    bubble, hops = _short(schedule, ranks, few, stages.rounded)
    if microbatches > few:
        # In the steady state the idle time grows with every round by as much as in one more round.
        more, _ = _short(schedule, ranks, few + ranks, stages.rounded)
        bubble += (more - bubble) * (microbatches - few) / ranks
    seconds = bubble * _ROUNDING * stages.mean + stages.busy * microbatches + hops * transfer
    return PipelineTime(seconds, hops * transfer)


def shorter(ranks: int, microbatches: int) -> int:
    """Number of microbatches of a shorter simulation, with as many left over from rounds as the recipe has."""
    least = _ROUNDS * ranks
    return microbatches if microbatches < least + ranks else least + microbatches % ranks


class _Program(NamedTuple):
    """The actions of all ranks in an order in which they can run: rank, stage, index of the kind, needed actions.

    A need is the number of an action, and whether it is on another rank.
    """

    actions: list[tuple[int, int, int, tuple[tuple[int, bool], ...]]]
    placement: list[int]


@functools.lru_cache(maxsize=1024)
def _program(schedule: Key, ranks: int, microbatches: int) -> _Program:
    orders = actions_of(schedule, ranks, microbatches)
    placement = schedule.value.placement(ranks=ranks)
    numbers: dict[Action, int] = {}
    actions: list[tuple[int, int, int, tuple[tuple[int, bool], ...]]] = []
    for rank, action, needs in executed(orders, stages=len(placement)):
        numbers[action] = len(actions)
        waits = tuple((numbers[need], placement[need.stage] != rank) for need in needs)
        actions.append((rank, action.stage, _KINDS.index(action.kind), waits))
    return _Program(actions, placement)


@functools.lru_cache(maxsize=16384)
def _short(schedule: Key, ranks: int, microbatches: int, stages: tuple[StageTime, ...]) -> tuple[float, float]:
    """Idle time of the busiest rank in a step, and the number of transfers that the step waits for."""
    program = _program(schedule, ranks, microbatches)
    by_rank = [0.0] * ranks
    for stage, rank in enumerate(program.placement):
        by_rank[rank] += sum(stages[stage])
    without = _duration(program, ranks, stages, 0.0)
    small = _SMALL / _ROUNDING
    return without - max(by_rank) * microbatches, (_duration(program, ranks, stages, small) - without) / small


def _duration(program: _Program, ranks: int, stages: Sequence[StageTime], transfer: float) -> float:
    """End of the last action; the same as `titanlab.schedule.timeline.simulate`, whose order is found once."""
    times = [(stage.forward, stage.inputs + stage.weights, stage.inputs, stage.weights) for stage in stages]
    free = [0.0] * ranks
    ends: list[float] = []
    for rank, stage, kind, needs in program.actions:
        begin = free[rank]
        for need, sent in needs:
            arrival = ends[need] + transfer if sent else ends[need]
            if arrival > begin:
                begin = arrival
        free[rank] = end = begin + times[stage][kind]
        ends.append(end)
    return max(free)


def _durations(stages: Sequence[StageTime]) -> Durations:
    return {
        Kind.FORWARD: [stage.forward for stage in stages],
        Kind.BACKWARD: [stage.inputs + stage.weights for stage in stages],
        Kind.INPUT: [stage.inputs for stage in stages],
        Kind.WEIGHT: [stage.weights for stage in stages],
    }
