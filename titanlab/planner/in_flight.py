"""How many microbatches each stage of a pipeline's rank keeps at the same time."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import TypeVar

from titanlab.costs.config_key import Key
from titanlab.planner.actions import actions_of
from titanlab.planner.stages import placement_of
from titanlab.planner.timing.pipeline_time import shorter
from titanlab.schedule.action import Action, Kind

# For each moment of a rank with most microbatches, the number of each of its stages between their forward and the
# gradient of their input; then of each between the two halves of a split backward.
Moments = tuple[tuple[int, ...], ...]
# The same two numbers of each moment, added up over the rank's stages.
Totals = tuple[tuple[int, int], ...]
T = TypeVar("T")
# Each moment is compared with so many of the largest ones. More would find more that are covered, and take longer than
# they save.
_COMPARED = 4


@functools.lru_cache(maxsize=4096)
def peaks(schedule: Key, *, ranks: int, microbatches: int, rank: int) -> Moments:
    """The moments of a rank in which its memory may be largest: no much larger one has as many of every stage.

    The order of numbers is that of the rank's stages.
    """
    return _steady(lambda count: _peaks(schedule, ranks, count, rank), ranks, microbatches)


@functools.lru_cache(maxsize=4096)
def totals(schedule: Key, *, ranks: int, microbatches: int) -> tuple[Totals, ...]:
    """By rank: the totals of the moments in which its memory may be largest if its stages are alike.

    Without the moments of which another one has as many.
    """
    return _steady(lambda count: _totals(schedule, ranks, count), ranks, microbatches)


def _steady(value_of: Callable[[int], T], ranks: int, microbatches: int) -> T:
    """The value for some microbatches. If more of them change nothing, others do not either, and are not listed."""
    few = shorter(ranks, microbatches)
    if few < microbatches:
        of_few = value_of(few)
        if of_few == value_of(min(microbatches, few + ranks)):
            return of_few
    return value_of(microbatches)


@functools.lru_cache(maxsize=4096)
def _totals(schedule: Key, ranks: int, microbatches: int) -> tuple[Totals, ...]:
    return tuple(map(_totals_of, actions_of(schedule, ranks, microbatches)))


def _totals_of(order: Sequence[Action]) -> Totals:
    ahead, halves, maxima, rose = 0, 0, set(), False
    for _, kind, _ in order:
        if kind is Kind.FORWARD:
            ahead += 1
            rose = True
            continue
        # Only before a number falls can it have been largest.
        if rose:
            maxima.add((ahead, halves))
        if kind is Kind.WEIGHT:
            halves -= 1
            rose = False
        else:
            ahead -= 1
            rose = kind is Kind.INPUT
            halves += rose
    maxima.add((ahead, halves))
    largest: list[tuple[int, int]] = []
    for pair in sorted(maxima, reverse=True):
        if not largest or pair[1] > largest[-1][1]:
            largest.append(pair)
    return tuple(reversed(largest))


@functools.lru_cache(maxsize=4096)
def _peaks(schedule: Key, ranks: int, microbatches: int, rank: int) -> Moments:
    stages = [stage for stage, owner in enumerate(placement_of(schedule, ranks)) if owner == rank]
    return _of_rank(actions_of(schedule, ranks, microbatches)[rank], stages)


def _of_rank(order: Sequence[Action], stages: Sequence[int]) -> Moments:
    place = {stage: number for number, stage in enumerate(stages)}
    alive, maxima, rose = [0] * 2 * len(stages), set(), False
    for stage, kind, _ in order:
        number = place[stage]
        if kind is Kind.FORWARD:
            alive[number] += 1
            rose = True
            continue
        # Only before a number falls can it have been largest.
        if rose:
            maxima.add(tuple(alive))
        alive[number + len(stages) if kind is Kind.WEIGHT else number] -= 1
        rose = kind is Kind.INPUT
        if rose:
            alive[number + len(stages)] += 1
    maxima.add(tuple(alive))
    largest: list[tuple[int, ...]] = []
    # A moment that another one covers has a smaller sum.
    for moment in sorted(maxima, key=sum, reverse=True):
        if not any(_covers(other, moment) for other in largest[:_COMPARED]):
            largest.append(moment)
    return tuple(sorted(largest))


def _covers(large: Sequence[int], small: Sequence[int]) -> bool:
    return all(map(operator.ge, large, small))
