"""Every schedule, for any number of ranks and microbatches: valid, never stuck, as idle and as large as it should be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.schedule.conftest import KINDS, LOOPED, Schedule
from titanlab.techniques.schedule.action import Kind, placement_of, validate
from titanlab.techniques.schedule.timeline import peak_in_flight, simulate

RANKS = st.integers(1, 8)
MICROBATCHES = st.integers(1, 40)
EQUAL = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.INPUT: 1.0, Kind.WEIGHT: 1.0}


@given(st.sampled_from(KINDS), RANKS, st.integers(1, 4), MICROBATCHES)
def test_they_are_complete_and_never_stuck(kind, ranks, stages_per_rank, microbatches):
    schedule = Schedule(kind, stages_per_rank)
    if kind == "dualpipe_v":
        microbatches += 2 * ranks
    orders, placement = schedule.actions(ranks, microbatches), schedule.placement(ranks)
    validate(orders, placement, microbatches=microbatches)
    assert placement_of(orders) == placement
    assert sorted(set(placement)) == list(range(ranks))
    assert len(placement) == ranks * schedule.stages_per_rank


@pytest.mark.full
def test_all_of_them_up_to_a_size_are_complete_and_never_stuck():
    for kind in KINDS:
        for stages_per_rank in (1, 2, 3, 5) if kind in LOOPED else (2,):
            schedule = Schedule(kind, stages_per_rank)
            for ranks in range(1, 8):
                for microbatches in range(2 * ranks if kind == "dualpipe_v" else 1, 24):
                    orders = schedule.actions(ranks, microbatches)
                    assert validate(orders, schedule.placement(ranks), microbatches=microbatches) is None


@given(st.sampled_from(KINDS), st.integers(2, 8), st.integers(1, 4), MICROBATCHES)
def test_what_they_say_of_their_actions_is_so(kind, ranks, stages_per_rank, microbatches):
    schedule = Schedule(kind, stages_per_rank)
    if kind == "dualpipe_v":
        microbatches += 2 * ranks
    orders = schedule.actions(ranks, microbatches)
    sizes = {"ranks": ranks, "microbatches": microbatches}
    assert schedule.config.peak_in_flight(**sizes) == max(map(peak_in_flight, orders))
    splits = any(action.kind is Kind.WEIGHT for order in orders for action in order)
    assert schedule.config.splits_backward(**sizes) == splits


@given(st.sampled_from(["gpipe", "1f1b"]), RANKS, MICROBATCHES)
def test_one_stage_a_rank_idles_as_the_formula_says(kind, ranks, microbatches):
    schedule = Schedule(kind)
    timeline = simulate(schedule.actions(ranks, microbatches), schedule.placement(ranks), EQUAL)
    assert timeline.bubble_share == pytest.approx((ranks - 1) / (microbatches + ranks - 1))


@given(st.sampled_from(["interleaved_1f1b", "looped_bfs"]), RANKS, st.integers(1, 4), st.integers(1, 5))
def test_several_stages_divide_the_idle_time(kind, ranks, stages_per_rank, rounds_):
    schedule, microbatches = Schedule(kind, stages_per_rank), ranks * rounds_
    timeline = simulate(schedule.actions(ranks, microbatches), schedule.placement(ranks), EQUAL)
    expected = (ranks - 1) / (stages_per_rank * microbatches + ranks - 1)
    assert timeline.bubble_share == pytest.approx(expected)


@given(RANKS, MICROBATCHES)
def test_activations_kept(ranks, microbatches):
    def peaks(kind: str) -> list[float]:
        schedule = Schedule(kind)
        return simulate(schedule.actions(ranks, microbatches), schedule.placement(ranks)).peak_in_flight

    assert peaks("gpipe") == [microbatches] * ranks
    assert peaks("looped_bfs") == [microbatches] * ranks
    assert peaks("1f1b") == [min(microbatches, ranks - rank) for rank in range(ranks)]
    # The paper's promise: no more than 1F1B keeps on its first rank.
    assert max(peaks("zbv")) <= min(microbatches, ranks)
