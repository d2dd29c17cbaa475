"""schedule=interleaved_1f1b and interleaved_zero_bubble: microbatches in rounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.schedule.conftest import Schedule, words
from titanlab.techniques.schedule.published_schema import rounds
from titanlab.techniques.schedule.timeline import simulate

RANKS = st.integers(1, 8)
MICROBATCHES = st.integers(1, 40)


@given(RANKS, st.integers(1, 4), st.integers(1, 5))
def test_interleaved_keeps_what_its_warm_up_takes(ranks, stages_per_rank, rounds_):
    schedule = Schedule("interleaved_1f1b", stages_per_rank)
    timeline = simulate(schedule.actions(ranks, ranks * rounds_), schedule.placement(ranks))
    total = stages_per_rank * ranks * rounds_
    taken = [(stages_per_rank - 1) * ranks + 2 * (ranks - 1 - rank) for rank in range(ranks)]
    assert timeline.peak_in_flight == pytest.approx([min(total, each + 1) / stages_per_rank for each in taken])


@given(RANKS, MICROBATCHES)
def test_rounds_share_microbatches_out(ranks, microbatches):
    found = rounds(ranks=ranks, microbatches=microbatches)
    sizes = [len(each) for each in found]
    assert [microbatch for each in found for microbatch in each] == list(range(microbatches))
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert min(sizes) >= min(ranks, microbatches)


@pytest.mark.parametrize(
    ("ranks", "microbatches", "sizes"),
    [(4, 1, [1]), (4, 4, [4]), (4, 7, [7]), (4, 8, [4, 4]), (4, 11, [6, 5]), (4, 13, [5, 4, 4]), (1, 3, [1, 1, 1])],
)
def test_a_round_has_at_least_as_many_microbatches_as_there_are_ranks(ranks, microbatches, sizes):
    assert [len(each) for each in rounds(ranks=ranks, microbatches=microbatches)] == sizes


def test_the_order_of_interleaved_1f1b():
    assert words(Schedule("interleaved_1f1b", 2).actions(2, 4)) == [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ]


def test_gradients_of_weights_lag_by_the_number_of_the_rank():
    assert words(Schedule("interleaved_zero_bubble", 2).actions(2, 2)) == [
        "0F0 0F1 2F0 2F1 2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1",
        "1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1",
    ]


def test_one_stage_a_rank_of_one_rank_takes_turns():
    assert words(Schedule("interleaved_1f1b", 1).actions(1, 2)) == ["0F0 0B0 0F1 0B1"]
    assert words(Schedule("interleaved_zero_bubble", 1).actions(1, 2)) == ["0F0 0I0 0W0 0F1 0I1 0W1"]


@pytest.mark.parametrize("microbatches", [2, 4, 12])
def test_zero_bubbles_are_smaller_than_those_of_interleaved_1f1b(microbatches):
    def idle(kind):
        schedule = Schedule(kind, 2)
        return simulate(schedule.actions(2, microbatches), schedule.placement(2)).bubble_share

    assert idle("interleaved_zero_bubble") < idle("interleaved_1f1b")
