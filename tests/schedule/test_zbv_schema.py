"""schedule=zbv: zero bubble over stages laid out as a V."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.schedule.conftest import Schedule, words
from titanlab.techniques.schedule.action import Kind
from titanlab.techniques.schedule.timeline import simulate

RANKS = st.integers(1, 8)
MICROBATCHES = st.integers(1, 40)
EQUAL = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.INPUT: 1.0, Kind.WEIGHT: 1.0}


@given(RANKS, MICROBATCHES)
def test_zbv_idles_only_before_its_first_and_after_its_last_action(ranks, more):
    schedule = Schedule("zbv")
    timeline = simulate(schedule.actions(ranks, 2 * ranks - 2 + more), schedule.placement(ranks), EQUAL)
    for events in timeline.events:
        assert all(event.end == following.begin for event, following in zip(events, events[1:], strict=False))


def test_the_order_of_one_rank():
    assert words(Schedule("zbv").actions(1, 1)) == ["0F0 1F0 1I0 1W0 0I0 0W0"]


def test_the_order_of_two_ranks():
    assert words(Schedule("zbv").actions(2, 3)) == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2",
        "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2",
    ]


def test_fewer_microbatches_are_the_first_of_an_order_for_more():
    assert words(Schedule("zbv").actions(3, 2)) == [
        "0F0 0F1 5F0 5I0 5W0 5F1 5I1 5W1 0I0 0W0 0I1 0W1",
        "1F0 1F1 4F0 4F1 4I0 4W0 4I1 4W1 1I0 1W0 1I1 1W1",
        "2F0 3F0 2F1 3F1 3I0 3W0 2I0 2W0 3I1 3W1 2I1 2W1",
    ]


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_ranks_are_idle_only_while_they_wait_for_each_other_at_the_ends(ranks):
    schedule, microbatches = Schedule("zbv"), 4 * ranks
    timeline = simulate(schedule.actions(ranks, microbatches), schedule.placement(ranks), EQUAL)
    # A rank has 6 units of work for each microbatch; the ends of the ranks differ by ranks - 1.
    assert timeline.duration == 6 * microbatches + ranks - 1
