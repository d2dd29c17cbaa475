"""The space has every layout that the rules allow, and no other; and each option once, the recipe's own first."""

from __future__ import annotations

import dataclasses
import math

import pytest

from tests.plan.recipes import SMALL, planned, ranking_of
from titanlab.costs import Layout
from titanlab.errors import ConfigError
from titanlab.options import discover
from titanlab.plan.space import BEYOND_NODE, SHORT_CHUNKS, UNEVEN_NODES, VARIED, all_layouts, choices_of
from titanlab.recipe import check_all_but_data
from titanlab.techniques.compile.schema import Compile
from titanlab.techniques.model.llama_schema import Qwen3Moe
from titanlab.techniques.precision.cast_schema import Fp16, Fp32
from titanlab.techniques.schedule.published_schema import GPipe

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
    recipe = planned(world=4, batch=4, seq_len=8192)
    space = ranking_of(recipe).space
    listed = set(space.layouts())
    for layout in all_layouts(4):
        legal = False
        for point in [] if space.recipe.training.global_batch % layout.data else space.points(layout):
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


def test_chunks_of_context_parallelism_have_1024_tokens_if_another_layout_is_allowed():
    recipe = planned(world=16, batch=16, seq_len=4096)
    space = ranking_of(recipe).space
    assert {layout.context for layout in space.layouts()} == {1, 2}
    assert space.dropped[SHORT_CHUNKS] > 0
    # A CPU needs no such length, and one sequence of tokens for 16 processes leaves no other layout.
    on_cpu = dataclasses.replace(recipe, cluster=dataclasses.replace(recipe.cluster, accelerator="cpu"))
    assert {layout.context for layout in ranking_of(on_cpu).space.layouts()} > {1, 2, 4}
    alone = planned(world=64, batch=1, model=dataclasses.replace(SMALL, layers=1, heads=1, kv_heads=1))
    assert {layout.context for layout in ranking_of(alone).space.layouts()} == {64}


def test_a_copy_of_the_model_fills_whole_nodes_or_divides_one():
    space = ranking_of(planned(world=24, batch=24)).space
    copies = {layout.fsdp * layout.tensor for layout in space.layouts() if layout.replicate > 1}
    assert copies <= {1, 2, 4, 8}
    assert space.dropped[UNEVEN_NODES] > 0


def names(choices):
    return [choice.name for choice in choices]


def test_each_option_is_there_once_and_the_recipes_own_first():
    choices = choices_of(planned(schedule=GPipe(), precision=Fp32()), vary=VARIED)
    assert (names(choices.schedules)[0], names(choices.precisions)[0], names(choices.acs)[0]) == (
        *("gpipe", "fp32", "none"),
    )
    for each in (choices.schedules, choices.acs, choices.precisions, choices.compiles):
        assert len(set(names(each))) == len({repr(choice.value) for choice in each}) == len(each)


def test_schedules_and_checkpointing_always_vary_and_the_rest_on_demand():
    choices = choices_of(planned())
    kinds = {choice.value.kind for choice in choices.schedules}
    assert {"1f1b", "gpipe", "interleaved_1f1b", "looped_bfs", "zbv", "dualpipe_v"} <= kinds
    assert {"1f1b", "zbv ×2", "interleaved_1f1b ×2", "interleaved_1f1b ×4"} <= set(names(choices.schedules))
    # A schedule of a file needs a value from a person.
    assert kinds < {option.kind for option in discover()["schedule"].values()}
    assert (names(choices.precisions), names(choices.compiles)) == (["bf16"], ["off"])


def test_a_policy_that_a_compiler_chooses_is_not_estimated():
    choices = choices_of(planned())
    assert "none" in names(choices.acs)
    assert all(choice.value.compiler_budget() is None for choice in choices.acs)
    assert "memory_budget" not in {choice.value.kind for choice in choices.acs}
    assert "memory_budget" in {option.kind for option in discover()["ac"].values()}


def test_fields_that_are_not_at_their_default_are_named():
    choices = choices_of(planned(precision=Fp16(init_scale=8.0, dynamic=False)), vary=("precision",))
    assert names(choices.precisions)[0] == "fp16 init_scale=8.0 dynamic=false"
    # The default is another choice.
    assert "fp16" in names(choices.precisions)[1:]


@pytest.mark.parametrize(
    ("own", "found"),
    [
        (Compile(), ["off", "block+loss"]),
        (Compile(blocks=True), ["block", "off", "block+loss"]),
        (Compile(loss=True), ["loss", "off", "block+loss"]),
        (Compile(blocks=True, loss=True), ["block+loss", "off"]),
    ],
)
def test_compilation_varies_between_nothing_and_all(own, found):
    assert names(choices_of(planned(compile=own), vary=("compile",)).compiles) == found
    assert names(choices_of(planned(compile=own)).compiles) == found[:1]


@pytest.mark.parametrize("name", ["optimizer", "", "Precision"])
def test_other_groups_do_not_vary(name):
    with pytest.raises(ConfigError, match="--vary"):
        choices_of(planned(), vary=(name,))
