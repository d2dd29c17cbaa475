"""Every schedule, for any number of ranks and microbatches: valid, never stuck, as idle and as large as it should be."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.schedule.conftest import KINDS, LOOPED, V_SHAPED, Schedule, orders
from titanlab.errors import ConfigError
from titanlab.techniques.schedule.action import Kind, placement_of, simulate, validate
from titanlab.techniques.schedule.contract import OneStage, PipelineSchedule, stages_of
from titanlab.techniques.schedule.published_schema import rounds

RANKS = st.integers(1, 8)
MICROBATCHES = st.integers(1, 40)
EQUAL = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.INPUT: 1.0, Kind.WEIGHT: 1.0}


@given(st.sampled_from(KINDS), RANKS, st.integers(1, 4), MICROBATCHES)
def test_they_are_complete_and_never_stuck(kind, ranks, stages_per_rank, microbatches):
    schedule = Schedule(kind, stages_per_rank)
    if kind == "dualpipe_v":
        microbatches += 2 * ranks
    lists, placement = schedule.actions(ranks, microbatches), schedule.placement(ranks)
    validate(lists, placement, microbatches=microbatches)
    assert placement_of(lists) == placement
    assert sorted(set(placement)) == list(range(ranks))
    assert len(placement) == ranks * schedule.stages_per_rank


@given(st.sampled_from(KINDS), RANKS, st.integers(1, 4), MICROBATCHES)
def test_what_they_say_of_their_actions_is_so(kind, ranks, stages_per_rank, microbatches):
    schedule = Schedule(kind, stages_per_rank)
    if kind == "dualpipe_v":
        microbatches += 2 * ranks
    lists = schedule.actions(ranks, microbatches)
    sizes = {"ranks": ranks, "microbatches": microbatches}
    assert schedule.config.peak_in_flight(**sizes) == PipelineSchedule.peak_in_flight(schedule.config, **sizes)
    splits = any(action.kind is Kind.WEIGHT for order in lists for action in order)
    assert schedule.config.splits_backward(**sizes) == splits


@dataclass(frozen=True, kw_only=True)
class Given(OneStage):
    """A schedule of another package, which defines its actions alone."""

    kind: str = "given"
    lists: tuple[str, ...] = ("0F0 0F1 0B0 0B1", "1F0 1I0 1W0 1F1 1B1")

    def actions(self, *, ranks, microbatches):
        return orders(*self.lists)


def test_what_a_schedule_does_not_say_is_counted_in_its_actions():
    sizes = {"ranks": 2, "microbatches": 2}
    assert Given().peak_in_flight(**sizes) == 2
    assert Given(lists=("0F0 0B0 0F1 0B1",)).peak_in_flight(**sizes) == 1
    assert (Given().splits_backward(**sizes), Given(lists=("0F0 0B0",)).splits_backward(**sizes)) == (True, False)
    assert (Given().fixed_size(), Given().check(None), list(Given().alternatives())) == (None, None, [Given()])
    Given().check_pipeline(ranks=1, microbatches=1)


def test_placements():
    assert Schedule("1f1b").placement(3) == [0, 1, 2]
    assert Schedule("looped_bfs", 2).placement(3) == [0, 1, 2, 0, 1, 2]
    assert Schedule("zbv").placement(3) == [0, 1, 2, 2, 1, 0]
    assert (stages_of([0, 1, 1, 0], 0), stages_of([0, 1, 0, 1, 0, 1], 1), stages_of([0, 1], 2)) == (
        [0, 3],
        [1, 3, 5],
        [],
    )


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_stages(kind):
    schedule = Schedule(kind, 3)
    assert [schedule.config.stage_count(ranks=ranks) for ranks in (1, 2, 5)] == [
        len(schedule.placement(ranks)) for ranks in (1, 2, 5)
    ]
    # The planner compares them where there is a choice.
    others = list(schedule.config.alternatives())
    assert {type(each) for each in others} == {type(schedule.config)}
    if kind in LOOPED:
        assert [each.stages_per_rank for each in others] == [2, 4, 8]
        with pytest.raises(ConfigError, match="schedule.stages_per_rank=0: must be at least 1; try 2"):
            Schedule(kind, 0)
    else:
        assert others == [schedule.config]


@pytest.mark.parametrize("kind", V_SHAPED)
@pytest.mark.parametrize("stages_per_rank", [1, 3])
def test_a_v_has_two_stages_a_rank(kind, stages_per_rank):
    schema = type(Schedule(kind).config)
    with pytest.raises(ConfigError, match=f"schedule.stages_per_rank={stages_per_rank}: .*each rank has two; try 2"):
        schema(stages_per_rank=stages_per_rank)


@pytest.mark.parametrize(("microbatches", "factor"), [(7, 2), (4, 2), (3, 3), (1, 8)])
def test_dualpipe_v_needs_a_microbatch_for_each_stage(microbatches, factor):
    rule = f"schedule=dualpipe_v: needs at least 8 microbatches, .* a step has {microbatches}; "
    with pytest.raises(ConfigError, match=rule + f"try schedule=zbv, or training.global_batch times {factor}"):
        Schedule("dualpipe_v").actions(4, microbatches)
    # Both ways out are ways out.
    Schedule("dualpipe_v").actions(4, microbatches * factor)
    Schedule("zbv").actions(4, microbatches)


@given(RANKS, MICROBATCHES)
def test_zbv_idles_only_before_its_first_and_after_its_last_action(ranks, more):
    schedule, microbatches = Schedule("zbv"), 2 * ranks - 2 + more
    timeline = simulate(schedule.actions(ranks, microbatches), schedule.placement(ranks), EQUAL)
    for events in timeline.events:
        assert all(event.end == following.begin for event, following in zip(events, events[1:], strict=False))
    # A rank has 6 units of work for each microbatch; the ends of the ranks differ by ranks - 1.
    assert timeline.duration == 6 * microbatches + ranks - 1


@given(RANKS, MICROBATCHES)
def test_rounds_share_microbatches_out(ranks, microbatches):
    """Where torch has no order, because they cannot be shared out equally."""
    found = rounds(ranks=ranks, microbatches=microbatches)
    sizes = [len(each) for each in found]
    assert [microbatch for each in found for microbatch in each] == list(range(microbatches))
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert min(sizes) >= min(ranks, microbatches)


@given(st.sampled_from(["gpipe", "1f1b"]), RANKS, MICROBATCHES)
def test_one_stage_a_rank_idles_as_the_formula_says(kind, ranks, microbatches):
    schedule = Schedule(kind)
    timeline = simulate(schedule.actions(ranks, microbatches), schedule.placement(ranks), EQUAL)
    assert timeline.bubble_share == pytest.approx((ranks - 1) / (microbatches + ranks - 1))


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
