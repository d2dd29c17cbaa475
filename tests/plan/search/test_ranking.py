"""The search finds what estimates of all recipes would rank first."""

from __future__ import annotations

import dataclasses

import pytest

from tests.plan.layouts import planned, ranking_of
from titanlab.plan.space import choices_of

TOP = 20


def exhaustive(ranking):
    """The times of all recipes that fit and break no rule, fastest first."""
    found = []
    for layout in ranking.space.layouts():
        for point in ranking.space.points(layout):
            one = ranking.estimate(point)
            if one is not None and not ranking.space.broken_rule(one.recipe):
                found.append(one.time.seconds)
    return sorted(found)


@pytest.mark.parametrize(("world", "limit"), [(4, None), (8, None), (8, 6e7)], ids=["four", "eight", "little memory"])
def test_pruning_keeps_the_first_twenty(world, limit):
    recipe = planned(world=world, batch=8)
    choices = choices_of(recipe)
    few = [choice for choice in choices.schedules if choice.name in ("1f1b", "interleaved_1f1b ×2", "zbv ×2", "gpipe")]
    assert len(few) == 4
    acs = [choice for choice in choices.acs if choice.name in ("none", "full")]
    best = ranking_of(recipe, limit=limit, schedules=few, acs=acs).best(TOP)
    wanted = exhaustive(ranking_of(recipe, limit=limit, schedules=few, acs=acs))[:TOP]
    assert len(wanted) == TOP
    assert [one.time.seconds for one in best] == pytest.approx(wanted, rel=1e-12)


def test_what_is_ranked_fits_and_is_fastest_first():
    ranking = ranking_of(planned(batch=8), limit=6e7)
    best = ranking.best(10)
    assert all(one.reserved <= 6e7 for one in best)
    assert [one.time.seconds for one in best] == sorted(one.time.seconds for one in best)
    assert ranking.too_large > 0


def test_a_limit_that_nothing_meets_names_the_smallest():
    ranking = ranking_of(planned(batch=8), limit=1e6)
    assert ranking.best(3) == []
    assert ranking.too_large == ranking.listed > 0
    needed, recipe = ranking.least
    assert needed > 1e6
    assert recipe.layout.world == 8


def test_a_ranking_can_be_asked_twice():
    ranking = ranking_of(planned(world=2, batch=2))
    first = [one.point for one in ranking.best(3)]
    assert [one.point for one in ranking.best(3)] == first
    assert dataclasses.is_dataclass(ranking)
