"""Timelines: when actions run, how long ranks are idle, and what they keep."""

from __future__ import annotations

import pytest

from tests.schedule.conftest import orders
from titanlab.techniques.schedule.action import Kind, peak_in_flight, simulate


def test_a_timeline():
    timeline = simulate(
        orders("0F0 0F1 0B0 0B1", "1F0 1I0 1W0 1F1 1B1"),
        [0, 1],
        {Kind.FORWARD: [1.0, 2.0], Kind.BACKWARD: 3.0, Kind.INPUT: 1.0, Kind.WEIGHT: 0.5},
        transfer=0.25,
    )
    found = [[(str(event.action), event.begin, event.end) for event in row] for row in timeline.events]
    assert found == [
        [("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 4.5, 7.5), ("0B1", 10, 13)],
        [("1F0", 1.25, 3.25), ("1I0", 3.25, 4.25), ("1W0", 4.25, 4.75), ("1F1", 4.75, 6.75), ("1B1", 6.75, 9.75)],
    ]
    assert timeline.duration == 13
    assert timeline.bubble_share == pytest.approx(1 - (8 + 8.5) / 26)
    assert timeline.peak_in_flight == [2, 1]


def test_activations_are_kept_until_the_weights_have_their_gradient():
    assert peak_in_flight(orders("0F0 0I0 0F1 0I1 0W0 0W1")[0]) == 2
    assert peak_in_flight(orders("0F0 0I0 0W0 0F1 0B1")[0]) == 1
    assert peak_in_flight(orders("0F0 3F0 3B0 0B0")[0]) == 1
    assert peak_in_flight(orders("0F0 0F1 3F0 3B0 0B0")[0]) == 1.5


def test_without_actions_nothing_takes_time():
    for lists in ([], [[]], [[], []]):
        timeline = simulate(lists, range(len(lists)))
        assert (timeline.duration, timeline.bubble_share) == (0.0, 0.0)
        assert timeline.events == lists
        assert timeline.peak_in_flight == [0.0] * len(lists)


def test_one_rank_is_never_idle():
    timeline = simulate(orders("0F0 0B0 0F1 0B1"), [0])
    assert [(event.begin, event.end) for event in timeline.events[0]] == [(0, 1), (1, 3), (3, 4), (4, 6)]
    assert (timeline.duration, timeline.bubble_share) == (6, 0)


def test_a_transfer_delays_only_what_comes_from_another_rank():
    timeline = simulate(orders("0F0 1F0 1B0 0B0"), [0, 0], transfer=5.0)
    assert timeline.duration == 6
    timeline = simulate(orders("0F0 0B0", "1F0 1B0"), [0, 1], transfer=5.0)
    assert timeline.duration == 16
    assert timeline.bubble_share == pytest.approx(1 - 6 / 32)


def test_actions_of_no_duration_have_no_bubble():
    timeline = simulate(orders("0F0 0B0", "1F0 1B0"), [0, 1], dict.fromkeys(Kind, 0.0))
    assert (timeline.duration, timeline.bubble_share) == (0, 0)
