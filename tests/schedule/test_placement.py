"""Which rank has which stage."""

from __future__ import annotations

import pytest

from tests.schedule.conftest import KINDS, LOOPED, V_SHAPED, Schedule
from titanlab.errors import ConfigError
from titanlab.techniques.schedule.contract import looped, stages_of, v_shaped


def test_placements():
    assert Schedule("1f1b").placement(3) == [0, 1, 2]
    assert Schedule("looped_bfs", 2).placement(3) == [0, 1, 2, 0, 1, 2]
    assert Schedule("zbv").placement(3) == [0, 1, 2, 2, 1, 0]


@pytest.mark.parametrize("kind", V_SHAPED)
@pytest.mark.parametrize("stages_per_rank", [1, 3])
def test_a_v_has_two_stages_a_rank(kind, stages_per_rank):
    schema = type(Schedule(kind).config)
    with pytest.raises(ConfigError, match=f"schedule.stages_per_rank={stages_per_rank}: .*two a rank; try 2"):
        schema(stages_per_rank=stages_per_rank)


@pytest.mark.parametrize("kind", LOOPED)
def test_a_rank_has_a_stage(kind):
    with pytest.raises(ConfigError, match="schedule.stages_per_rank=0: every rank has at least one stage; try 2"):
        Schedule(kind, 0)


def test_stages_go_round_or_there_and_back():
    assert looped(ranks=1) == [0]
    assert looped(ranks=2, stages_per_rank=3) == [0, 1, 0, 1, 0, 1]
    assert v_shaped(ranks=1) == [0, 0]
    assert v_shaped(ranks=2) == [0, 1, 1, 0]


def test_a_ranks_stages_are_in_the_order_of_the_forward_pass():
    assert stages_of([0, 1, 1, 0], 0) == [0, 3]
    assert stages_of([0, 1, 0, 1, 0, 1], 1) == [1, 3, 5]
    assert stages_of([0, 1], 2) == stages_of([], 0) == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_number_of_stages_is_that_of_the_placement(kind):
    schedule = Schedule(kind, 3)
    for ranks in (1, 2, 5):
        assert schedule.config.stage_count(ranks=ranks) == len(schedule.placement(ranks))


@pytest.mark.parametrize("kind", KINDS)
def test_the_planner_compares_numbers_of_stages_where_there_is_a_choice(kind):
    config = Schedule(kind, 3).config
    if kind in LOOPED:
        assert [each.stages_per_rank for each in config.alternatives()] == [2, 4, 8]
        assert {type(each) for each in config.alternatives()} == {type(config)}
    else:
        assert list(config.alternatives()) == [config]
