"""A bound of the idle time of a pipeline's ranks, without a simulation."""

from __future__ import annotations

import functools
from itertools import accumulate

from titanlab.costs.config_key import Key
from titanlab.planner.timing.stage import StageTime


@functools.lru_cache(maxsize=16384)
def least_idle(schedule: Key, placement: tuple[int, ...], stages: tuple[StageTime, ...], microbatches: int) -> float:
    """How much longer than its busiest rank computes a pipeline takes at least, if messages take no time.

    Every rank waits twice. At the beginning, the first microbatch has to pass the stages before its own, and all stages
    before its first gradient arrives; until then the rank can only run forward passes, of as many microbatches as it
    keeps. At the end, after its last gradient of an input, that microbatch has to pass the stages before its own; the
    rank can then only compute gradients of weights, of as many microbatches as it keeps.

    Args:
        schedule: config of the schedule.
        placement: rank of each stage.
        stages: times of each stage, in any unit.
    """
    ranks = 1 + max(placement)
    splits = splits_backward(schedule, ranks, microbatches)
    kept = schedule.value.peak_in_flight(ranks=ranks, microbatches=microbatches)
    backward = [stage.inputs if splits else stage.inputs + stage.weights for stage in stages]
    # Sums over the stages before each one, and over those after it.
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
        ahead = most * max(stages[number].forward for number in numbers)
        begin = max(forward_before[first], gradient - ahead)
        weights = most * max(stages[number].weights for number in numbers) if splits else 0.0
        idle[rank] = begin + max(0.0, backward_before[first] - weights)
        busy[rank] = microbatches * sum(sum(stages[number]) for number in numbers)
    longest: float = max(busy[rank] + idle[rank] for rank in own)
    return longest - max(busy.values())


@functools.lru_cache(maxsize=4096)
def splits_backward(schedule: Key, ranks: int, microbatches: int) -> bool:
    """See `PipelineSchedule`."""
    splits: bool = ranks > 1 and schedule.value.splits_backward(ranks=ranks, microbatches=microbatches)
    return splits
