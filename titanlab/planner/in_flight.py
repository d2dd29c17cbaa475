"""How many microbatches each stage of a pipeline's rank keeps at the same time."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

from titanlab.planner.actions import actions_of
from titanlab.planner.model_facts import Key
from titanlab.planner.timing.pipeline_time import shorter
from titanlab.schedule.action import Action, Kind

# By rank: for each of its moments with most microbatches, the number of each of its stages between their forward and
# the gradient of their input; then of each between the two halves of a split backward.
Peaks = tuple[tuple[tuple[int, ...], ...], ...]
# Each moment is compared with so many of the largest ones. More would find more that are covered, and take longer than
# they save.
_COMPARED = 4


@functools.lru_cache(maxsize=4096)
def peaks(schedule: Key, *, ranks: int, microbatches: int) -> Peaks:
    """The moments of each rank in which its memory may be largest: no much larger one has as many of every stage.

    The order of numbers is that of the rank's stages. For many microbatches the actions are not all made: if some more
    microbatches change nothing, others do not either.
    """
    few = shorter(ranks, microbatches)
    if few < microbatches:
        found = _peaks(schedule, ranks, few)
        if found == _peaks(schedule, ranks, min(microbatches, few + ranks)):
            return found
    return _peaks(schedule, ranks, microbatches)


@functools.lru_cache(maxsize=4096)
def totals(schedule: Key, *, ranks: int, microbatches: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """By rank: the two numbers of the moments of `peaks`, each added up over the rank's stages.

    Without the moments of which another one has as many. They are few, and enough where a rank's stages are alike.
    """
    return tuple(_added_up(moments) for moments in peaks(schedule, ranks=ranks, microbatches=microbatches))


def _added_up(moments: Sequence[Sequence[int]]) -> tuple[tuple[int, int], ...]:
    pairs = {(sum(moment[: len(moment) // 2]), sum(moment[len(moment) // 2 :])) for moment in moments}
    return tuple(one for one in sorted(pairs) if not any(_covers(other, one) for other in pairs - {one}))


@functools.lru_cache(maxsize=4096)
def _peaks(schedule: Key, ranks: int, microbatches: int) -> Peaks:
    placement = schedule.value.placement(ranks=ranks)
    orders = actions_of(schedule, ranks, microbatches)
    return tuple(
        _of_rank(order, [stage for stage, owner in enumerate(placement) if owner == rank])
        for rank, order in enumerate(orders)
    )


def _of_rank(order: Sequence[Action], stages: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    place = {stage: number for number, stage in enumerate(stages)}
    alive, found, rose = [0] * 2 * len(stages), set(), False
    for stage, kind, _ in order:
        number = place[stage]
        if kind is Kind.FORWARD:
            alive[number] += 1
            rose = True
            continue
        # Only before a number falls can it have been largest.
        if rose:
            found.add(tuple(alive))
        alive[number + len(stages) if kind is Kind.WEIGHT else number] -= 1
        rose = kind is Kind.INPUT
        if rose:
            alive[number + len(stages)] += 1
    found.add(tuple(alive))
    largest: list[tuple[int, ...]] = []
    # A moment that another one covers has a smaller sum.
    for one in sorted(found, key=sum, reverse=True):
        if not any(_covers(other, one) for other in largest[:_COMPARED]):
            largest.append(one)
    return tuple(sorted(largest))


def _covers(large: Sequence[int], small: Sequence[int]) -> bool:
    return all(map(operator.ge, large, small))
