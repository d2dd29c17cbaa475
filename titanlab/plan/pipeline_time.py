"""The times of a pipeline's stages and of its step: simulated, estimated from a shorter simulation, or bounded."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from titanlab.plan.block_time import ModelTime, PieceTime, added_times, total
from titanlab.plan.stages import actions_of, parts_of, placement_of, splits_backward, stages_of
from titanlab.techniques.schedule.action import Kind, executed, simulate
from titanlab.techniques.schedule.contract import PipelineSchedule

# Times of stages are rounded to this share of their mean, so that recipes with similar stages share a simulation.
_ROUNDING = 0.005
# A shorter simulation has this many microbatches per rank, which is enough to reach the steady state.
_ROUNDS = 2
# A small transfer time, as a share of the mean stage time. With it, a simulated step is longer by one transfer time
# for each transfer that the step waits for.
_SMALL = 1e-4
_KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)


class StageTime(NamedTuple):
    """Seconds of one stage for one microbatch: forward, gradients of inputs, gradients of weights."""

    forward: float
    inputs: float
    weights: float


class PipelineTime(NamedTuple):
    """Seconds of all microbatches of a step, and how many of these seconds sending adds."""

    seconds: float
    sending: float


class Stages:
    """The times of a pipeline's stages, and sums over the stages.

    Attributes:
        busy, busiest: time of the busiest rank for one microbatch, and that rank's number.
        mean: mean time of a stage for one microbatch.
        rounded: times of each stage, in units of `_ROUNDING` · mean.
    """

    def __init__(self, stages: Sequence[StageTime], placement: Sequence[int]) -> None:
        self.stages, self.placement = tuple(stages), tuple(placement)
        by_rank = [0.0] * (1 + max(placement))
        for stage, rank in zip(stages, placement, strict=True):
            by_rank[rank] += sum(stage)
        self.busy = max(by_rank)
        self.busiest = by_rank.index(self.busy)
        self.mean = sum(by_rank) / len(stages)
        unit = _ROUNDING * self.mean
        rounded = {stage: StageTime(*(round(part / unit) for part in stage)) for stage in set(stages)}
        self.rounded = tuple([rounded[stage] for stage in stages])


class RankTime(NamedTuple):
    """Sums over the pieces of one stage or of one rank, in seconds for one microbatch.

    Attributes:
        blocks: number of blocks.
        edges: names of the other pieces.
        own: sums over the blocks alone.
        whole: sums over all pieces.
    """

    blocks: int
    edges: tuple[str, ...]
    own: PieceTime
    whole: PieceTime


def rank_stages(
    times: ModelTime, schedule: PipelineSchedule, split: tuple[Any, ...] | None, ranks: int
) -> tuple[RankTime, Stages | None]:
    """Sums over the stages of the rank that computes longest; and all stages (None without a pipeline)."""
    if ranks == 1:
        return _stage(times, times.kind_of, tuple(times.edges)), None
    stages = stages_of(times.model, schedule, split, ranks, times.seq_len)
    return _placed_stages(times, placement_of(schedule, ranks), stages)


@functools.lru_cache(maxsize=16384)
def _placed_stages(
    times: ModelTime, placement: tuple[int, ...], pieces: tuple[tuple[str, ...], ...]
) -> tuple[RankTime, Stages]:
    kinds = _stage_kinds(pieces, times.kind_of)
    # Most stages are alike: compute the times of each kind of stage once.
    known = {kind: _stage(times, *kind) for kind in set(kinds)}
    seconds = {kind: _seconds(stage.whole) for kind, stage in known.items()}
    pipeline = Stages([seconds[kind] for kind in kinds], placement)
    own = [known[kind] for kind, rank in zip(kinds, placement, strict=True) if rank == pipeline.busiest]
    busiest = RankTime(
        blocks=sum(stage.blocks for stage in own),
        edges=tuple(name for stage in own for name in stage.edges),
        own=added_times([stage.own for stage in own]),
        whole=added_times([stage.whole for stage in own]),
    )
    return busiest, pipeline


@functools.lru_cache(maxsize=1024)
def _stage_kinds(
    pieces: tuple[tuple[str, ...], ...], kind_of: tuple[int, ...]
) -> tuple[tuple[tuple[int, ...], tuple[str, ...]], ...]:
    """For each stage, the kinds of its blocks (sorted: their order changes no sum), and its other pieces."""
    return tuple((tuple(sorted(map(kind_of.__getitem__, own.blocks))), own.edges) for own in map(parts_of, pieces))


def _seconds(whole: PieceTime) -> StageTime:
    return StageTime(whole.ahead, whole.back - whole.weights, whole.weights)


@functools.lru_cache(maxsize=16384)
def _stage(times: ModelTime, kind_of: tuple[int, ...], edges: tuple[str, ...]) -> RankTime:
    """Sums over the pieces of a stage: its blocks by their kinds, and the others by name."""
    return RankTime(len(kind_of), edges, total(times, kind_of, ()), total(times, kind_of, edges))


# A function that gives the time of all microbatches. Its arguments: the schedule, the stages, the number of ranks, the
# number of microbatches, and the seconds to send a tensor to another rank.
PipelineEstimate = Callable[[PipelineSchedule, Stages, int, int, float], PipelineTime]


def simulated_time(
    schedule: PipelineSchedule, stages: Stages, ranks: int, microbatches: int, transfer: float
) -> PipelineTime:
    """The time of a pipeline, with every action simulated."""
    orders = schedule.actions(ranks=ranks, microbatches=microbatches)
    durations = durations_of(stages.stages)
    whole = simulate(orders, stages.placement, durations, transfer=transfer).duration
    without = simulate(orders, stages.placement, durations).duration if transfer else whole
    return PipelineTime(whole, whole - without)


def pipeline_time(
    schedule: PipelineSchedule, stages: Stages, ranks: int, microbatches: int, transfer: float
) -> PipelineTime:
    """The time of a pipeline, extrapolated from few simulated microbatches; similar recipes share the simulation."""
    few = shorter(schedule, ranks, microbatches)
    bubble, hops = _short(schedule, ranks, few, stages.rounded)
    if microbatches > few:
        # In the steady state each round adds the same idle time: one more simulated round tells how much.
        more, _ = _short(schedule, ranks, few + ranks, stages.rounded)
        bubble += (more - bubble) * (microbatches - few) / ranks
        # If every round lowers the idle time, the extrapolation could go below this bound.
        bubble = max(bubble, least_idle(schedule, stages.placement, stages.rounded, microbatches))
    seconds = bubble * _ROUNDING * stages.mean + stages.busy * microbatches + hops * transfer
    return PipelineTime(seconds, hops * transfer)


def least_time(
    schedule: PipelineSchedule, stages: Stages, ranks: int, microbatches: int, transfer: float
) -> PipelineTime:
    """A lower bound of `pipeline_time` without a simulation; in it, messages take no time."""
    idle = least_idle(schedule, stages.placement, stages.rounded, microbatches)
    return PipelineTime(idle * _ROUNDING * stages.mean + stages.busy * microbatches, 0.0)


def shorter(schedule: PipelineSchedule, ranks: int, microbatches: int) -> int:
    """Number of microbatches of a shorter simulation; its remainder modulo `ranks` is that of all microbatches."""
    if schedule.fixed_size() is not None:
        return microbatches
    # Schedules with nearly equal rounds need one more round to reach the steady state.
    least = (_ROUNDS + (microbatches % ranks > 0)) * ranks
    return microbatches if microbatches < least + ranks else least + microbatches % ranks


@functools.lru_cache(maxsize=1024)
def _program(schedule: PipelineSchedule, ranks: int, microbatches: int) -> list[tuple[int, int, int]]:
    """The actions of all ranks in an order in which they can run.

    For each action: its rank, the index of its stage and kind in a table of times, and the number of the other rank's
    action for which it waits, or -1. The actions of one rank run one after the other and need not wait for each other.
    """
    index = {kind: number for number, kind in enumerate(_KINDS)}
    actions: list[tuple[int, int, int]] = []
    stages = len(placement_of(schedule, ranks))
    for rank, (stage, kind, _), needs in executed(actions_of(schedule, ranks, microbatches), stages=stages):
        waits = -1
        for need in needs:
            if actions[need][0] != rank:
                waits = need
        actions.append((rank, stage * len(_KINDS) + index[kind], waits))
    return actions


@functools.lru_cache(maxsize=16384)
def _short(
    schedule: PipelineSchedule, ranks: int, microbatches: int, stages: tuple[StageTime, ...]
) -> tuple[float, float]:
    """Idle time of the busiest rank in a step, and the number of transfers for which the step waits."""
    program, durations = _program(schedule, ranks, microbatches), durations_of(stages)
    times = [durations[kind][stage] for stage in range(len(stages)) for kind in _KINDS]

    def duration(transfer: float) -> float:
        # As `techniques.schedule.action.simulate`, but the order of the actions was found once, by `_program`.
        free = [0.0] * ranks
        ends: list[float] = []
        for rank, place, need in program:
            begin = free[rank]
            if need >= 0:
                arrival = ends[need] + transfer
                if arrival > begin:
                    begin = arrival
            free[rank] = end = begin + times[place]
            ends.append(end)
        return max(free)

    by_rank = [0.0] * ranks
    for stage, rank in enumerate(placement_of(schedule, ranks)):
        by_rank[rank] += sum(stages[stage])
    without, small = duration(0.0), _SMALL / _ROUNDING
    return without - max(by_rank) * microbatches, (duration(small) - without) / small


def durations_of(stages: Sequence[StageTime]) -> dict[Kind, list[float]]:
    return {
        Kind.FORWARD: [stage.forward for stage in stages],
        Kind.BACKWARD: [stage.inputs + stage.weights for stage in stages],
        Kind.INPUT: [stage.inputs for stage in stages],
        Kind.WEIGHT: [stage.weights for stage in stages],
    }


@functools.lru_cache(maxsize=16384)
def least_idle(
    schedule: PipelineSchedule, placement: tuple[int, ...], stages: tuple[StageTime, ...], microbatches: int
) -> float:
    """A lower bound of a pipeline's time minus its busiest rank's computation, if messages take no time.

    Every rank waits twice. At the beginning, the first microbatch must pass the stages before the rank's own. Later it
    must pass all stages before the rank gets a gradient; until then the rank can only run forward passes, for as many
    microbatches as it keeps. At the end, the last gradient must pass the stages before the rank's own; meanwhile the
    rank can only compute gradients of weights, for as many microbatches as it keeps.

    Args:
        stages: times of each stage, in any unit.
    """
    ranks = 1 + max(placement)
    splits = splits_backward(schedule, ranks, microbatches)
    kept = schedule.peak_in_flight(ranks=ranks, microbatches=microbatches)
    backward = [stage.inputs if splits else stage.inputs + stage.weights for stage in stages]
    # For each stage, the sum over the stages before it.
    forward_before = [0.0, *accumulate(stage.forward for stage in stages)]
    backward_before = [0.0, *accumulate(backward)]
    own: dict[int, list[int]] = {}
    for number, rank in enumerate(placement):
        own.setdefault(rank, []).append(number)
    idle, busy = {}, {}
    for rank, numbers in own.items():
        first, last = numbers[0], numbers[-1]
        most = min(kept, microbatches) * len(numbers)
        gradient = forward_before[-1] + backward_before[-1] - backward_before[last + 1]
        ahead = most * max([stages[number].forward for number in numbers])
        begin = max(forward_before[first], gradient - ahead)
        weights = most * max([stages[number].weights for number in numbers]) if splits else 0.0
        idle[rank] = begin + max(0.0, backward_before[first] - weights)
        busy[rank] = microbatches * sum([sum(stages[number]) for number in numbers])
    longest: float = max(busy[rank] + idle[rank] for rank in own)
    return longest - max(busy.values())
