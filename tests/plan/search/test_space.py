"""The space has every layout that the rules allow, and no other."""

from __future__ import annotations

import dataclasses
import math

import pytest

from tests.plan.layouts import planned, ranking_of
from titanlab.costs import Layout
from titanlab.errors import ConfigError
from titanlab.plan.search import summary
from titanlab.plan.space import BEYOND_NODE, all_layouts, choices_of
from titanlab.recipe import check_all_but_data
from titanlab.techniques.model.llama_schema import Qwen3Moe

MIXTURE = Qwen3Moe(dim=256, layers=2, heads=8, kv_heads=4, head_dim=32, ffn_dim=64, vocab_size=512, experts=8,
                   active_experts=2)  # fmt: skip


@pytest.mark.parametrize("world", [1, 2, 12, 16])
def test_all_layouts_are_all_products(world):
    found = list(all_layouts(world))
    assert all(layout.world == world for layout in found)
    assert len(set(found)) == len(found)
    # Ordered factorisations into five factors: for each prime power p^k, (k + 4 choose 4).
    powers = {1: [], 2: [1], 12: [2, 1], 16: [4]}[world]
    assert len(found) == math.prod(math.comb(power + 4, 4) for power in powers)


def test_legal_layouts_are_those_that_the_rules_of_recipes_allow():
    """Every layout of four processes, with the rules themselves as judge of each of its points."""
    recipe = planned(world=4, batch=4)
    space = ranking_of(recipe).space
    listed = set(space.layouts())
    for layout in all_layouts(4):
        legal = False
        for point in _points(space, layout):
            try:
                check_all_but_data(space.recipe_of(point))
                legal = True
                break
            except ConfigError:
                continue
        assert legal == (layout in listed), layout.label
    assert sum(space.dropped.values()) == len(list(all_layouts(4))) - len(listed)


@pytest.mark.parametrize("model", [{}, {"model": MIXTURE}])
@pytest.mark.parametrize("batch", [1, 6, 16])
def test_whether_there_is_a_layout_is_known_without_all_of_them(model, batch):
    found = set()
    for world in [*range(1, 41), 77, 96, 130, 1009]:
        space = ranking_of(planned(world=world, batch=batch, **model)).space
        assert space.has_layouts() == bool(space.layouts()), world
        found.add(space.has_layouts())
    assert found == {True, False}


def _points(space, layout):
    if space.recipe.training.global_batch % layout.data:
        return []
    return space.points(layout)


def test_expert_parallelism_goes_with_every_policy_and_with_compilation():
    recipe = planned(world=4, batch=4, model=MIXTURE)
    choices = choices_of(recipe, vary=("compile",))
    space = ranking_of(recipe, compiles=choices.compiles).space
    layout = Layout(shard=4, expert=2)
    assert layout in space.layouts()
    legal = {
        (point.ac.name, point.compile.name)
        for point in space.points(layout)
        if not space.broken_rule(space.recipe_of(point))
    }
    assert legal == {(ac.name, compiled.name) for ac in choices.acs for compiled in choices.compiles}
    assert {name for name, _ in legal} >= {"none", "full", "selective_op"}
    assert {name for _, name in legal} == {"off", "block+loss"}


def test_tensor_parallelism_stays_in_a_node_if_something_does():
    recipe = planned(world=8, batch=8)
    recipe = dataclasses.replace(recipe, cluster=dataclasses.replace(recipe.cluster, per_node=2))
    space = ranking_of(recipe).space
    assert {layout.tensor for layout in space.layouts()} == {1, 2}
    assert space.dropped[BEYOND_NODE] > 0


def test_the_summary_counts_what_it_leaves_out():
    assert summary({"a": 3, "b": 5, "c": 1}, 2) == ["5: b", "3: a", "1: 1 other rules"]
