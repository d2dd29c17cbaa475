"""The recipe of a run's next attempt: presets, degrees that are the rest, and a microbatch that fits."""

import pytest

from tests import tiny
from titanlab.cli.resume import CHANGEABLE
from titanlab.errors import ConfigError
from titanlab.recipe import adapted, from_mapping, next_recipe, recipe_changes, resolve, to_mapping


def config_of(tmp_path, **given):
    return to_mapping(tiny.recipe(tmp_path, layers=4, **given))


def changed(config, *overrides):
    recipe = next_recipe(config, overrides, CHANGEABLE, file="config.yaml", branch="titanlab train --from RUN")
    recipe, line = adapted(recipe, from_mapping(config), overrides)
    return resolve(recipe, world=None, accelerator="cpu", device="cpu"), line


@pytest.mark.parametrize(
    ("before", "overrides", "label", "world"),
    [
        ({"shard": 4}, ["parallelism=fsdp_tp"], "dp_s2·tp2", 4),
        ({"shard": 4}, ["parallelism=ddp", "world=2"], "dp_r2", 2),
        ({"shard": 2}, ["parallelism=single"], "single", 1),
        ({}, ["parallelism=hsdp", "world=4"], "dp_r2·dp_s2", 4),
        ({"shard": 4}, ["parallelism.shard=-1", "parallelism.context=2"], "dp_s2·cp2", 4),
        ({"shard": 4}, ["parallelism.shard=1", "parallelism.pipeline=2"], "pp2", 2),
        ({"shard": 4}, [], "dp_s4", 4),
    ],
)
def test_presets_and_degrees(tmp_path, before, overrides, label, world):
    recipe, _ = changed(config_of(tmp_path, **before), *overrides)
    assert (recipe.layout.label, recipe.world) == (label, world)


def test_a_schedule_and_a_policy_are_presets_and_the_rest_of_the_recipe_stays(tmp_path):
    config = config_of(tmp_path, pipeline=2)
    recipe, _ = changed(config, "schedule=zbv", "ac=selective_layer", "ac.every=4")
    assert (recipe.schedule.kind, recipe.ac.kind, recipe.ac.every) == ("zbv", "selective_layer", 4)
    assert set(recipe_changes(config, to_mapping(recipe))) == {"schedule", "ac"}


def test_projections_may_be_fused_from_now_on_and_no_other_field_of_a_model_changes(tmp_path):
    config = config_of(tmp_path)
    recipe, _ = changed(config, "model.fused=true")
    assert recipe.model.fused
    assert set(recipe_changes(config, to_mapping(recipe))) == {"model"}
    with pytest.raises(ConfigError, match="^model.layers=3: is not to be changed"):
        changed(config, "model.layers=3")


@pytest.mark.parametrize(
    ("before", "overrides", "microbatch", "passes"),
    [
        # Of 12 sequences each of four processes had three: one process has four times as many passes.
        ({"shard": 4}, ["parallelism=single"], 3, 4),
        ({"shard": 2, "microbatch": 2}, ["parallelism.shard=1"], 2, 6),
        # Two do not divide the three sequences that each process has now.
        ({"shard": 2, "microbatch": 2}, ["parallelism.shard=4"], 1, 3),
        # Nothing was given, and there is less to do: it stays with the default.
        ({}, ["parallelism.shard=2"], 6, 1),
        ({}, ["parallelism.shard=2", "training.microbatch=3"], 3, 2),
        ({"shard": 4}, ["parallelism=single", "parallelism.pipeline=2"], 1, 12),
        # This schedule needs four microbatches for its four stages.
        ({"microbatch": 12}, ["parallelism.pipeline=2", "schedule=dualpipe_v"], 3, 4),
    ],
)
def test_the_global_batch_is_kept_and_accumulation_adapts(tmp_path, before, overrides, microbatch, passes):
    recipe, line = changed(config_of(tmp_path, **before), *overrides)
    assert recipe.training.global_batch == 12
    assert (recipe.microbatch, recipe.microbatches) == (microbatch, passes)
    adapts = recipe.training.microbatch not in (before.get("microbatch"), None)
    assert bool(line) == (adapts and not any("microbatch" in text for text in overrides))
