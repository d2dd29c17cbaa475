"""The bound of the memory of a group of recipes: none of them needs less."""

from __future__ import annotations

import pytest

from tests.plan.layouts import planned, ranking_of
from titanlab.parallelism import Parallelism
from titanlab.plan import most_memory
from titanlab.plan.ranking import RecipeGroup, least_memory


def groups(space):
    """Each layout of the space with each microbatch and each other choice, and its schedules."""
    for layout in space.layouts():
        for microbatch, schedules in space.microbatches(layout):
            for ac, precision, compiled in space.others():
                yield RecipeGroup((layout,), microbatch, ac, precision, compiled), schedules


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"parallelism": Parallelism(shard=8, cpu_offload=True)},
        {"parallelism": Parallelism(shard=8, reshard_after_forward="never")},
    ],
    ids=["bf16", "offloaded", "kept gathered"],
)
def test_no_recipe_needs_less(given):
    space = ranking_of(planned(batch=8, **given)).space
    compared = 0
    for group, schedules in groups(space):
        everyone = least_memory(space.recipe, group, schedules)
        for schedule in schedules:
            least = least_memory(space.recipe, group, [schedule])
            needed = most_memory(space.recipe_of(group.point(group.layouts[0], schedule))).allocated
            assert everyone <= least <= needed
            compared += 1
    assert compared > 500


def test_more_microbatches_in_flight_need_more():
    space = ranking_of(planned(batch=32)).space
    group, schedules = next((group, schedules) for group, schedules in groups(space) if group.layouts[0].pipeline == 4)
    by_name = {schedule.name: least_memory(space.recipe, group, [schedule]) for schedule in schedules}
    assert by_name["1f1b"] < by_name["gpipe"]
