"""The frozen recipe of a run with some keys changed: which may change, and which errors there are."""

import json
from pathlib import Path

import pytest

from tests import tiny
from titanlab.errors import ConfigError
from titanlab.recipe import check_unedited, frozen_recipe, to_mapping
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
