"""Microbatches in flight, from the actions of the schedules."""

from __future__ import annotations

import pytest

from titanlab.errors import ConfigError
from titanlab.options import discover
from titanlab.plan.activations import _of_rank, _peaks, peaks, totals
from titanlab.techniques.schedule.action import Action, Kind
from titanlab.techniques.schedule.timeline import peak_in_flight

KINDS = sorted(kind for kind in discover()["schedule"] if kind != "csv")


def all_peaks(schedule, *, ranks, microbatches):
    return [peaks(schedule, ranks=ranks, microbatches=microbatches, rank=rank) for rank in range(ranks)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_sum_is_that_of_the_timeline(kind):
    schedule = discover()["schedule"][kind].schema()
    found = all_peaks(schedule, ranks=4, microbatches=8)
    orders = schedule.actions(ranks=4, microbatches=8)
    stages = len(schedule.placement(ranks=4)) // 4
    assert [max(sum(moment) for moment in rank) / stages for rank in found] == [peak_in_flight(o) for o in orders]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("microbatches", [13, 16, 30])
def test_many_microbatches_are_as_all_their_actions_say(kind, microbatches):
    key = discover()["schedule"][kind].schema()
    found = all_peaks(key, ranks=3, microbatches=microbatches)
    assert found == [_peaks(key, 3, microbatches, rank) for rank in range(3)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("saved", "deferred"), [(5, 0), (5, 3), (3, 5)])
def test_where_stages_are_alike_totals_say_as_much_as_all_moments(kind, saved, deferred):
    of = {"schedule": discover()["schedule"][kind].schema(), "ranks": 4, "microbatches": 12}
    apiece = len(of["schedule"].placement(ranks=4)) // 4
    own = [saved] * apiece + [deferred] * apiece
    moments = [
        max(sum(n * bytes_ for n, bytes_ in zip(moment, own, strict=True)) for moment in rank)
        for rank in all_peaks(**of)
    ]
    pairs = [
        max(passes * saved + halves * deferred for passes, halves in rank)
        for rank in [totals(**of, rank=rank) for rank in range(4)]
    ]
    assert pairs == moments


def test_a_microbatch_is_in_one_of_two_states_until_the_end_of_its_backward():
    # One rank, one stage: F, I, F, I, W, W.
    order = [Action(0, Kind(kind), number) for kind, number in zip("FIFIWW", (0, 0, 1, 1, 0, 1), strict=True)]
    # One ahead with one between its halves, and both between their halves.
    assert _of_rank(order, [0]) == ((0, 2), (1, 1))
    whole = [Action(0, Kind(kind), number) for kind, number in zip("FFBB", (0, 1, 0, 1), strict=True)]
    assert _of_rank(whole, [0]) == ((2, 0),)


def test_too_few_microbatches_are_the_schedules_error():
    with pytest.raises(ConfigError, match="at least 8 microbatches"):
        peaks(discover()["schedule"]["dualpipe_v"].schema(), ranks=4, microbatches=4, rank=0)
