"""The plan of a world: the request, resolved without this host; the fastest recipes; what would work if there is none."""

from __future__ import annotations

import dataclasses
import gc

import pytest

from tests.plan.layouts import planned
from titanlab.errors import ConfigError
from titanlab.launch.launchers_schema import Slurm
from titanlab.parallelism import Parallelism
from titanlab.plan import for_planning, no_collection, plan, space
from titanlab.plan.search import MARGIN
from titanlab.plan.space import all_layouts
from titanlab.recipe import Cluster


def refusal(call, *arguments, **given):
    with pytest.raises(ConfigError) as caught:
        call(*arguments, **given)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_only_the_product_of_degrees_matters_unless_they_stand():
    recipe = planned(parallelism=Parallelism(shard=2, tensor=2, pipeline=2))
    assert for_planning(recipe).layout.degrees() == {**Parallelism().degrees(), "shard": 8}
    assert for_planning(recipe, stands=True).layout.tensor == 2
    alone = dataclasses.replace(recipe, world=None)
    assert for_planning(alone).layout.world == 8


@pytest.mark.parametrize("world", [1_000_001, 99_999_999])
def test_a_world_that_no_recipe_may_have_is_refused_at_once(world):
    recipe = dataclasses.replace(planned(), world=world)
    assert refusal(for_planning, recipe).startswith(f"world={world}: a layout has at most 1,000,000 processes; ")


@pytest.mark.parametrize("world", [0, -1])
def test_a_world_of_nobody_is_refused(world):
    recipe = dataclasses.replace(planned(), world=world)
    assert refusal(for_planning, recipe).startswith(f"world={world}: must be at least 1; ")


def test_machines_of_which_nothing_is_known_are_refused():
    elsewhere = planned(cluster=Cluster(accelerator="auto"), launch=Slurm(minutes=10))
    assert refusal(for_planning, elsewhere).startswith("cluster.accelerator=auto: is whatever a node has")
    for device in (None, "cpu"):
        nameless = planned(cluster=Cluster(accelerator="cuda", device=device))
        assert refusal(for_planning, nameless).startswith(f"cluster.device={device or 'null'}: names no GPU")


@pytest.mark.parametrize("top", [0, -1, 1001])
def test_how_many_are_wanted_has_limits(top):
    assert refusal(plan, for_planning(planned()), top=top) == f"--top={top}: must lie in 1 to 1,000; try 20"


def test_the_best_are_in_order_and_fit():
    found = plan(for_planning(planned()), top=3)
    assert len(found.best) == 3
    assert found.advice == []
    seconds = [each.time.seconds for each in found.best]
    assert seconds == sorted(seconds)
    assert found.limit == pytest.approx(80e9 * (1 - MARGIN))
    assert {each.recipe.layout.world for each in found.best} == {8}


def test_where_nothing_fits_the_next_world_that_does_is_named():
    found = plan(for_planning(planned(memory_gb=0.01)), top=1)
    assert found.best == []
    assert found.advice[0].startswith("the smallest needs ")
    assert " GB of the 0.0 GB that a device has: " in found.advice[0]
    assert len(found.advice) == 2


def test_where_no_layout_divides_the_batch_others_are_named():
    found = plan(for_planning(planned(world=7, batch=10, seq_len=2047)), top=1)
    assert (found.listed, found.best) == (0, [])
    assert [line.partition(": ")[0] for line in found.advice] == [
        "the nearest smaller world that works", "or another batch",
    ]  # fmt: skip


def test_the_neighbours_of_a_large_prime_are_not_searched_whole(monkeypatch):
    """It took minutes: 256 worlds with up to 30,000 layouts each."""
    searched = []
    monkeypatch.setattr(space, "all_layouts", lambda world: (searched.append(world), all_layouts(world))[1])
    found = plan(for_planning(planned(world=100_003)), top=1)
    assert (found.listed, found.best, len(found.advice)) == (0, [], 1)
    assert found.advice[0].startswith("or another batch: training.global_batch=100003")
    assert set(searched) == {100_003}


def test_the_collector_rests_and_is_as_before():
    assert gc.isenabled()
    with pytest.raises(ValueError), no_collection():
        assert not gc.isenabled()
        raise ValueError
    assert gc.isenabled()
    gc.disable()
    try:
        with no_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
