"""What a schedule of another package gets without writing it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.schedule.conftest import KINDS, Schedule, orders
from titanlab.techniques.schedule.action import Kind
from titanlab.techniques.schedule.contract import OneStage, PipelineSchedule

ACTIONS = ("0F0 0F1 0B0 0B1", "1F0 1I0 1W0 1F1 1B1")


@dataclass(frozen=True, kw_only=True)
class Given(OneStage):
    """A schedule that defines its actions alone."""

    kind: str = "given"
    lists: tuple[str, ...] = ACTIONS

    def actions(self, *, ranks, microbatches):
        return orders(*self.lists)


def test_what_it_does_not_say_is_counted_in_its_actions():
    sizes = {"ranks": 2, "microbatches": 2}
    assert Given().peak_in_flight(**sizes) == 2
    assert Given(lists=("0F0 0B0 0F1 0B1",)).peak_in_flight(**sizes) == 1
    assert Given().splits_backward(**sizes)
    assert not Given(lists=("0F0 0B0",)).splits_backward(**sizes)


def test_it_supports_all_numbers_and_is_compared_with_nothing():
    given = Given()
    assert given.fixed_size() is None
    assert given.check_pipeline(ranks=1, microbatches=1) is None
    assert given.check(None) is None
    assert list(given.alternatives()) == [given]


@pytest.mark.parametrize("kind", KINDS)
def test_a_schedule_that_answers_sooner_answers_the_same(kind):
    config = Schedule(kind).config
    sizes = {"ranks": 3, "microbatches": 7}
    seen = any(action.kind is Kind.WEIGHT for order in config.actions(**sizes) for action in order)
    assert config.splits_backward(**sizes) == config.splits == seen
    assert config.peak_in_flight(**sizes) == PipelineSchedule.peak_in_flight(config, **sizes)
