"""The plan of a world: the request, resolved without this host; the fastest recipes; what would work if there is none."""

from __future__ import annotations

import dataclasses
import gc

import pytest

from tests.plan.recipes import LLAMA_8B, planned, ranking_of
from titanlab.costs import Layout
from titanlab.errors import ConfigError
from titanlab.launch.launchers_schema import Slurm
from titanlab.options import discover
from titanlab.parallelism import Parallelism
from titanlab.plan import for_planning, most_memory, no_collection, plan, ranking, search, space
from titanlab.plan.ranking import NEAR, axes_of, least_memory
from titanlab.plan.search import MARGIN, closeness, overrides, reasons, summary
from titanlab.plan.space import SpacePoint, choices_of
from titanlab.recipe import Cluster
from titanlab.techniques.ac.recomputation_schema import SelectiveLayer
from titanlab.techniques.schedule.published_schema import Interleaved1F1B


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


@pytest.mark.parametrize("world", [1_000_001, 99_999_999, 0, -1])
def test_a_world_that_no_recipe_may_have_is_refused_at_once(world):
    rule = "must be at least 1; " if world < 1 else "a layout has at most 1,000,000 processes; "
    assert refusal(for_planning, dataclasses.replace(planned(), world=world)).startswith(f"world={world}: {rule}")


def test_machines_of_which_nothing_is_known_are_refused():
    elsewhere = planned(cluster=Cluster(accelerator="auto"), launch=Slurm(minutes=10))
    assert refusal(for_planning, elsewhere).startswith("cluster.accelerator=auto: is whatever a node has")
    nameless = planned(cluster=Cluster(accelerator="cuda"))
    assert refusal(for_planning, nameless).startswith("cluster.device=null: names no GPU")


def test_the_cure_for_cpus_with_a_recipe_for_gpus_works():
    on_cpus = Cluster(accelerator="cuda", device="cpu", per_node=8)
    cure = "try cluster=h100, or add cluster.accelerator=cpu"
    assert refusal(for_planning, planned(cluster=on_cpus)).endswith(
        f"is not a GPU, and cluster.accelerator=cuda; {cure}"
    )
    cured = dataclasses.replace(on_cpus, accelerator="cpu")
    assert plan(for_planning(planned(world=2, batch=2, seq_len=256, cluster=cured)), top=1).best


@pytest.mark.parametrize("top", [0, -1, 1001])
def test_how_many_are_wanted_has_limits(top):
    assert refusal(plan, for_planning(planned()), top=top) == f"--top={top}: must lie in 1 to 1,000; try 20"


def test_a_precision_that_the_device_does_not_have_is_refused():
    cluster = Cluster(accelerator="cuda", device="NVIDIA A100-SXM4-80GB", per_node=8, memory_gb=80)
    recipe = for_planning(planned(precision=discover()["precision"]["mxfp8"].schema(), cluster=cluster))
    assert refusal(plan, recipe).startswith("precision=mxfp8: ")


def test_the_best_are_in_order_and_fit():
    found = plan(for_planning(planned()), top=3)
    assert len(found.best) == 3
    assert found.advice == []
    first, *others = [each.time.seconds for each in found.best]
    assert others == sorted(others)
    assert first <= (1 + NEAR) * others[0]
    assert found.ranking.limit == pytest.approx(80e9 * (1 - MARGIN))
    assert {each.recipe.layout.world for each in found.best} == {8}


def test_of_recipes_that_are_nearly_as_fast_the_first_has_the_fewest_axes(monkeypatch):
    for module in (ranking, search):
        monkeypatch.setattr(module, "NEAR", 0.5)
    found = plan(for_planning(planned(world=16, batch=64)), top=40)
    fastest = min(each.time.seconds for each in found.best)
    near = [each for each in found.best if each.time.seconds <= 1.5 * fastest]
    axes = [axes_of(each.recipe.layout) for each in near]
    assert axes[0] == min(axes) < max(axes)
    assert near[0].time.seconds == min(
        each.time.seconds for each, own in zip(near, axes, strict=True) if own == axes[0]
    )
    why, second = reasons(found.best)[:2]
    assert why.startswith("1 has the fewest axes of those within 50 % of the fastest, 2 (")
    assert " s faster: " in second


def test_the_plan_says_how_close_the_first_recipe_comes_to_the_memory():
    found = plan(for_planning(planned()), top=1)
    left = (80e9 - found.best[0].reserved) / 1e9
    assert closeness(found).startswith(f"1 leaves {left:.1f} of 80 GB; the median error of the estimate is ")
    assert closeness(plan(for_planning(planned(memory_gb=0.01)), top=1)) == ""


def test_where_nothing_fits_the_next_world_that_does_is_named():
    found = plan(for_planning(planned(memory_gb=0.01)), top=1)
    assert found.best == []
    assert found.advice[0].startswith("the smallest needs ")
    assert " GB of the 0.0 GB that a device has: " in found.advice[0]
    assert len(found.advice) == 2


def test_where_no_layout_divides_the_batch_others_are_named():
    found = plan(for_planning(planned(world=7, batch=10, seq_len=2047)), top=1)
    assert (found.ranking.listed, found.best) == (0, [])
    assert [line.partition(": ")[0] for line in found.advice] == [
        "the nearest smaller world that works", "or another batch",
    ]  # fmt: skip


def test_the_neighbours_of_a_large_prime_are_not_searched_whole(monkeypatch):
    """It took minutes: 256 worlds with up to 30,000 layouts each."""
    searched = []
    whole = space._without_experts
    monkeypatch.setattr(space, "_without_experts", lambda world: (searched.append(world), whole(world))[1])
    found = plan(for_planning(planned(world=100_003)), top=1)
    assert (found.ranking.listed, found.best, len(found.advice)) == (0, [], 1)
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


def test_a_limit_that_nothing_meets_names_the_smallest():
    ranking = ranking_of(planned(batch=8), limit=1e6)
    assert ranking.best(3) == []
    assert ranking.too_large == ranking.listed > 0
    needed, recipe = ranking.least
    assert needed > 1e6
    assert recipe.layout.world == 8


def groups(space):
    """The recipes of each layout with each microbatch and each other choice, and their schedules."""
    for layout in space.layouts():
        for microbatch, schedules in space.microbatches(layout):
            for ac, precision, compiled in space.others():
                points = [SpacePoint(layout, microbatch, schedule, ac, precision, compiled) for schedule in schedules]
                yield [space.recipe_of(point) for point in points], schedules


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"parallelism": Parallelism(shard=8, cpu_offload=True)},
        {"parallelism": Parallelism(shard=8, reshard_after_forward="never")},
        {"parallelism": Parallelism(shard=8, reduce_gradients="each")},
    ],
    ids=["bf16", "offloaded", "kept gathered", "reduced each"],
)
def test_no_recipe_needs_less(given):
    space = ranking_of(planned(batch=8, **given)).space
    compared = 0
    for recipes, schedules in groups(space):
        each = recipes[0].reduces_each
        everyone = least_memory(recipes[0], schedules, reduces_each=each)
        for recipe, schedule in zip(recipes, schedules, strict=True):
            least = least_memory(recipe, [schedule], reduces_each=each)
            assert everyone <= least <= most_memory(recipe).allocated
            compared += 1
    assert compared > 500


def test_each_microbatch_reduces_where_only_that_fits():
    """Of a recipe that leaves the choice open; the arguments name a choice that is not that of `auto`."""
    recipe = planned(batch=64)
    whole = ranking_of(recipe)
    point = next(whole.space.points(Layout(shard=8)))
    assert point.microbatch == 1
    fast = whole.estimate(point)
    small = ranking_of(recipe, limit=fast.reserved - 1).estimate(point)
    assert small.reserved < fast.reserved
    assert small.time.seconds > fast.time.seconds
    argument = "parallelism.reduce_gradients"
    assert not any(argument in each for each in overrides(fast, recipe))
    assert f"{argument}=each" in overrides(small, recipe)
    fixed = planned(batch=64, parallelism=Parallelism(shard=8, reduce_gradients="last"))
    assert ranking_of(fixed, limit=fast.reserved - 1).estimate(point) is None
    # Of 8 billion parameters `auto` would not keep whole gradients.
    large = planned(batch=64, model=LLAMA_8B)
    assert f"{argument}=last" in overrides(ranking_of(large, limit=1e12).estimate(point), large)


def test_more_microbatches_in_flight_need_more():
    space = ranking_of(planned(batch=32)).space
    recipes, schedules = next(each for each in groups(space) if each[0][0].layout.pipeline == 4)
    by_name = {schedule.name: least_memory(recipes[0], [schedule]) for schedule in schedules}
    assert by_name["1f1b"] < by_name["gpipe"]


def printed(recipe, *, pipeline, ac, schedule):
    """The arguments of the first recipe of the space with these choices."""
    ranking = ranking_of(recipe)
    layout = next(layout for layout in ranking.space.layouts() if layout.pipeline == pipeline)
    points = ranking.space.points(layout)
    point = next(one for one in points if (one.ac.name, one.schedule.name) == (ac, schedule))
    return overrides(ranking.estimate(point), recipe)


def test_options_have_their_numbers_also_those_that_are_defaults():
    """The recipe of the request has every=4 and four stages, and keeps them unless they are said."""
    recipe = planned(ac=SelectiveLayer(every=4), schedule=Interleaved1F1B(stages_per_rank=4))
    arguments = printed(recipe, pipeline=2, ac="selective_layer", schedule="interleaved_1f1b ×2")
    assert {"ac=selective_layer", "ac.every=2", "ac.keep=false"} < set(arguments)
    assert {"schedule=interleaved_1f1b", "schedule.stages_per_rank=2"} < set(arguments)
    alone = printed(planned(), pipeline=1, ac="none", schedule="")
    assert "ac=none" in alone
    assert not [one for one in alone if one.startswith("schedule")]


def test_what_varies_is_said_if_it_is_not_the_requests():
    recipe = planned()
    choices = choices_of(recipe, vary=("precision", "compile"))
    ranking = ranking_of(recipe, precisions=choices.precisions, compiles=choices.compiles)
    points = {(one.precision.name, one.compile.name): one for one in ranking.space.points(Layout(shard=8))}
    own = overrides(ranking.estimate(points["bf16", "off"]), recipe)
    assert not [one for one in own if one.startswith(("precision", "compile"))]
    other = overrides(ranking.estimate(points["float8_rowwise", "block+loss"]), recipe)
    assert {"precision=float8_rowwise", "compile.blocks=true", "compile.loss=true", "compile.mode=default"} < set(other)


def test_the_summary_counts_what_it_leaves_out():
    assert summary({"a": 3, "b": 5, "c": 1}, 2) == ["5: b", "3: a", "1: 1 other rules"]
