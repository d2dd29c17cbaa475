"""A wrong schedule is refused: the line names the place, or which action waits for which."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.schedule.conftest import KINDS, Schedule, orders
from titanlab.techniques.schedule.action import Kind, OrderError, peak_in_flight, placement_of, simulate, validate


def refusal(*ranks: str, placement: tuple[int, ...] = (0, 1), microbatches: int = 1) -> str:
    with pytest.raises(OrderError) as caught:
        validate(orders(*ranks), placement, microbatches=microbatches)
    return str(caught.value)


@pytest.mark.parametrize(
    ("ranks", "placement"),
    [
        (("0F0 0B0", "1F0 1B0"), [0, 1]),
        (("0F0 0I0 0W0", "1F0 1I0 1W0"), [0, 1]),
        (("0F0 0B0", "1F0 1I0 1W0"), [0, 1]),
        (("0F0 1F0 1B0 0B0",), [0, 0]),
    ],
)
def test_what_is_one(ranks, placement):
    assert validate(orders(*ranks), placement, microbatches=1) is None
    assert placement_of(orders(*ranks)) == placement


@pytest.mark.parametrize(
    ("ranks", "complaint"),
    [
        (("0F0 0B0", "1F0"), "rank 1: 1B0, or I and W instead, is missing"),
        (("0B0", "1F0 1B0"), "rank 0: 0F0 is missing"),
        (("0F0 0I0", "1F0 1B0"), "rank 0: 0W0 is missing"),
        (("0F0 0W0", "1F0 1B0"), "rank 0: 0I0 is missing"),
        (("0F0 0B0 0F0", "1F0 1B0"), "rank 0, action 3: 0F0 occurs twice"),
        (("0F0 0B0 0W0", "1F0 1B0"), "rank 0, action 3: 0W0: the backward pass is B, or I and W, not both"),
        (("0F0 0I0 0B0", "1F0 1B0"), "rank 0, action 3: 0B0: the backward pass is B, or I and W, not both"),
        (("0F0 0B0 1F0", "1B0"), "rank 0, action 3: 1F0: stage 1 is on rank 1"),
        (("0F0 0B0 0F1", "1F0 1B0"), "rank 0, action 3: 0F1: there are 2 stages and 1 microbatches, counted from 0"),
        (("0F0 0B0", "1F0 1B0 2F0"), "rank 1, action 3: 2F0: there are 2 stages"),
        (("0F0 0W0 0I0", "1F0 1B0"), "rank 0, action 2: 0W0 on rank 0 waits for 0I0, which comes after 0W0 on rank 0"),
        (("0B0 0F0", "1F0 1B0"), "rank 0, action 1: 0B0 on rank 0 waits for 0F0, which comes after 0B0 on rank 0"),
    ],
)  # fmt: skip
def test_what_is_none(ranks, complaint):
    assert refusal(*ranks).startswith(complaint)


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        # A circle.
        (("0F0 0B0 0F1 0B1", "1F0 1F1 1B1 1I0 1W0"), "rank 0, action 2: 0B0 on rank 0 waits for 1I0, which comes after 1F1 on rank 1; 1F1 on rank 1 waits for 0F1, which comes after 0B0 on rank 0"),
        (("0B0 0F0",), "rank 0, action 1: 0B0 on rank 0 waits for 0F0, which comes after 0B0 on rank 0"),
        # What nobody does, for which many ranks wait.
        (("0F0 0B0", "1F0"), "rank 0, action 2: 0B0 on rank 0 waits for 1I0, which is on no rank"),
        (("0F0 0B0", *(f"{stage}F0 {stage}B0" for stage in range(1, 6)), "6F0"), "rank 0, action 2: 0B0 on rank 0 waits for 1B0, which comes on rank 1; 1B0 on rank 1 waits for 2B0, which comes on rank 2; 2B0 on rank 2 waits for 3B0, which comes on rank 3; 3B0 on rank 3 waits for 4B0, which comes on rank 4; and 2 more ranks wait"),
    ],
)  # fmt: skip
def test_ranks_that_wait_for_each_other_have_no_timeline(ranks, told):
    with pytest.raises(OrderError) as caught:
        simulate(orders(*ranks), range(len(ranks)))
    assert str(caught.value) == told


def test_placements_are_read_off():
    assert placement_of(orders("0F0 3F0", "1F0 2F0")) == [0, 1, 1, 0]
    for ranks, complaint in [
        (("0F0", "1F0 0B0"), "rank 1, action 2: 0B0: stage 0 is on rank 0 already"),
        (("0F0", ""), "rank 1: has no action"),
        (("0F0", "2F0"), "rank 1: there is a stage 2, but no rank has stage 1"),
    ]:
        with pytest.raises(OrderError) as caught:
            placement_of(orders(*ranks))
        assert str(caught.value) == complaint


@given(st.sampled_from(KINDS), st.integers(1, 4), st.integers(0, 6), st.data())
def test_without_one_of_its_actions_no_schedule_is_valid(kind, ranks, more, data):
    schedule, microbatches = Schedule(kind), 2 * ranks + more
    lists = schedule.actions(ranks, microbatches)
    rank = data.draw(st.integers(0, ranks - 1))
    index = data.draw(st.integers(0, len(lists[rank]) - 1))
    del lists[rank][index]
    with pytest.raises(OrderError, match="is missing"):
        validate(lists, schedule.placement(ranks), microbatches=microbatches)


def test_the_error_goes_from_process_to_process():
    error = pickle.loads(pickle.dumps(OrderError(1, 2, "why")))
    assert (error.rank, error.index, error.rule, str(error)) == (1, 2, "why", "rank 1, action 3: why")


# Timelines: when actions run, how long ranks are idle, and what they keep


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


def test_a_transfer_delays_only_what_comes_from_another_rank():
    timeline = simulate(orders("0F0 1F0 1B0 0B0"), [0, 0], transfer=5.0)
    assert timeline.duration == 6
    timeline = simulate(orders("0F0 0B0", "1F0 1B0"), [0, 1], transfer=5.0)
    assert timeline.duration == 16
    assert timeline.bubble_share == pytest.approx(1 - 6 / 32)


def test_actions_of_no_duration_have_no_bubble():
    timeline = simulate(orders("0F0 0B0", "1F0 1B0"), [0, 1], dict.fromkeys(Kind, 0.0))
    assert (timeline.duration, timeline.bubble_share) == (0, 0)
