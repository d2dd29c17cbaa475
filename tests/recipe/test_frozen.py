"""The frozen recipe of a run with some keys changed: which may change, and which errors there are."""

import json
from pathlib import Path

import pytest

from tests import tiny
from titanlab.cli.resume import CHANGEABLE
from titanlab.errors import ConfigError
from titanlab.recipe import (
    adapted,
    check_unedited,
    from_mapping,
    frozen_recipe,
    next_recipe,
    recipe_changes,
    resolve,
    to_mapping,
)
from titanlab.recipe.next_attempt import overridden
from titanlab.records import config_text, create_run, identify

FILE = Path("run/config.yaml")
MEND = "mend that file; if another version of titanlab made it, use that version"


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return to_mapping(tiny.recipe(tmp_path_factory.mktemp("runs")))


def test_without_overrides_the_recipe_is_that_of_the_run(config):
    assert to_mapping(overridden(config, [], file=FILE)) == config


def test_overrides_are_the_types_of_their_keys(config):
    recipe = overridden(config, ["seed=3", "training.steps=20", "optimizer.lr=1e-4", "name='7'"], file=FILE)
    assert (recipe.seed, recipe.training.steps, recipe.optimizer.lr, recipe.name) == (3, 20, 1e-4, "7")


@pytest.mark.parametrize("text", ["${seed}", "a${b}", "${oc.env:HF_TOKEN}", "\\${seed}", "${nope:1}"])
def test_nothing_in_a_value_is_looked_up(config, text):
    assert overridden(config, [f"name={text}"], file=FILE).name == text
    assert overridden({**config, "name": text}, ["seed=1"], file=FILE).name == text


@pytest.mark.parametrize("overrides", [[], ["seed=3"], ["training.seq_len=3"]])
def test_what_is_wrong_with_the_file_is_not_blamed_on_the_override(config, overrides):
    damaged = {**config, "training": {**config["training"], "steps": "x"}}
    with pytest.raises(ConfigError, match=r"^training.steps=x: .* \(in run/config.yaml\)") as raised:
        overridden(damaged, overrides, file=FILE)
    assert raised.value.cure == MEND
    # An override may mend it.
    assert overridden(damaged, ["training.steps=3"], file=FILE).training.steps == 3


def test_an_attempt_has_a_recipe_of_its_own(tmp_path):
    run = tiny.begin(tiny.recipe(tmp_path, seed=1))
    run.begin_attempt({**run.config(), "seed": 2}, {})
    assert [frozen_recipe(run).seed, frozen_recipe(run, attempt=1).seed, frozen_recipe(run, attempt=2).seed] == [
        1,
        1,
        2,
    ]
    assert frozen_recipe(run, ["seed=5"], attempt=2).seed == 5
    (run.attempt_folder(2) / "config.yaml").write_text("a: [")
    with pytest.raises(ConfigError):
        frozen_recipe(run, attempt=2)
    assert frozen_recipe(run).seed == 1


def made(folder, **changed):
    """A run in whose config.yaml some values were edited: `made(folder, model={"fused": True}, seed=3)`."""
    recipe = tiny.recipe(folder)
    run = create_run(
        recipe.runs, name="toy", identity=identify(recipe, data="tiny", hardware="cpu"), config=to_mapping(recipe)
    )
    config = run.config()
    for key, value in changed.items():
        config[key] = {**config[key], **value} if isinstance(value, dict) else value
    (run.path / "config.yaml").write_text(config_text(config))
    return run


@pytest.mark.parametrize(
    ("changed", "key", "value", "before"),
    [
        ({"optimizer": {"lr": 0.1}}, "optimizer.lr", 0.1, 0.001),
        ({"seed": 3}, "seed", 3, 0),
        ({"training": {"steps": 20}}, "training.steps", 20, 10),
        # No value of the hash: the field is newer than some runs, and had the value of the earlier behaviour.
        ({"model": {"fused": True}}, "model.fused", True, "another value"),
        ({"precision": {"kind": "bf16"}}, "precision.kind", "bf16", "fp32"),
        ({"parallelism": {"shard": 2}, "world": 2}, "world", 2, 1),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else None,
)
def test_a_config_that_was_edited_is_told_from_the_runs_own(tmp_path, changed, key, value, before):
    run = made(tmp_path, **changed)
    with pytest.raises(ConfigError) as caught:
        check_unedited(run)
    assert (caught.value.key, caught.value.value) == (key, value)
    assert caught.value.rule == f"the run was made with {before}, by its identity.json"
    assert caught.value.cure.startswith(f"set it back in {run.path / 'config.yaml'}; ")
    with pytest.raises(ConfigError, match="by its identity.json"):
        frozen_recipe(run)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"name": "another", "runs": "elsewhere"},
        {"tracker": {"kind": "tensorboard"}, "launch": {"threads": 3}},
        {"training": {"log_every": 7}, "checkpoint": {"every": 3}},
    ],
)
def test_what_no_identity_covers_may_be_edited(tmp_path, changed):
    check_unedited(made(tmp_path, **changed))


def test_a_run_of_an_earlier_version_has_fewer_keys(tmp_path):
    """A field that was added since is in neither file, and has its default."""
    run = made(tmp_path)
    config, identity = run.config(), json.loads((run.path / "identity.json").read_text())
    del config["optimizer"]["eps"], identity["content"]["recipe"]["optimizer"]["eps"]
    (run.path / "config.yaml").write_text(config_text(config))
    (run.path / "identity.json").write_text(json.dumps(identity))
    check_unedited(run)
    # A line that was removed by hand is an edit.
    identity["content"]["recipe"]["optimizer"]["eps"] = 1e-3
    (run.path / "identity.json").write_text(json.dumps(identity))
    with pytest.raises(ConfigError, match=r"optimizer.eps=1e-08: the run was made with 0.001"):
        check_unedited(run)


# The recipe of a run's next attempt: presets, degrees that are the rest, and a microbatch that fits


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
