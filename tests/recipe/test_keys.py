"""All keys of recipes: which values they take, and what is said of a key that is none."""

import re
from pathlib import Path

import pytest

from titanlab.recipe import advice, find_key, known_keys, read_flags
from titanlab.recipe.torchtitan import KEYS

CONF = Path(__file__).parents[2] / "conf"


@pytest.mark.parametrize(
    ("name", "words", "default"),
    [
        ("seed", "a whole number", "0"),
        ("name", "text", "run"),
        ("world", "a whole number or null", "null"),
        ("training", "keys of its own", None),
        ("training.steps", "a whole number", "1000"),
        ("compile.blocks", "true or false", "false"),
        ("optimizer.lr", "a number", "0.0003"),
        ("optimizer.betas", "a list of numbers", "[0.9,0.95]"),
        ("optimizer.schedule", "keys of its own", None),
        ("checkpoint.load_from", "text or null", "null"),
        ("launch.environment", "a value of the key's type", None),
    ],
)
def test_what_a_key_accepts_is_said_in_words(name, words, default):
    key = find_key(name)
    assert (key.name, key.accepted_values, key.default) == (name, words, default)


def test_a_key_of_several_options_is_that_of_the_schema_in_question():
    schemas = [key.option.schema for key in known_keys() if key.name == "optimizer.lr"]
    assert len(schemas) > 1
    for schema in schemas:
        assert find_key("optimizer.lr", schema).option.schema is schema
    assert find_key("optimizer.lr", int).option.schema is schemas[0]


def test_of_several_options_each_has_its_keys_under_its_name():
    key = find_key("tracker.wandb.project")
    assert (key.name, key.option.kind) == ("tracker.project", "wandb")
    assert find_key("tracker.project", kind="wandb").option.kind == "wandb"
    assert find_key("tracker.project", kind="jsonl") is None
    assert find_key("tracker.jsonl.project") is None


@pytest.mark.parametrize("name", ["", ".", "nope", "training.", "training.steps.x", "model.", "Seed"])
def test_what_is_no_key_is_not_found(name):
    assert find_key(name) is None


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("training.global_batch_size", "is training.global_batch"),
        ("training.max_norm", "is training.max_grad_norm"),
        ("training.warmup_steps", "is optimizer.schedule.warmup_steps"),
        ("lr_scheduler.decay_ratio", "is optimizer.schedule.decay_fraction"),
        ("parallelism.fsdp_reshard_after_forward", "is parallelism.reshard_after_forward"),
        ("comm.trace_buf_size", "has no counterpart: the Flight Recorder"),
    ],
)
def test_a_key_of_torchtitan_leads_to_ours(name, ours):
    assert advice(name).startswith(f"torchtitan's {name} {ours}")


def test_what_keys_of_torchtitan_lead_to_exists():
    groups = {path.name: {file.stem for file in path.iterdir()} for path in CONF.iterdir() if path.is_dir()}
    for ours in (known.ours for known in KEYS.values()):
        named = re.findall(r"[\w.]+(?:=\w*)?", ours)
        options = [word.partition("=") for word in named if re.fullmatch(r"[a-z]+=\w+", word)]
        assert all(option in groups[group] for group, _, option in options)
        dotted = [word.partition("=")[0] for word in named if "." in word]
        assert all(find_key(key) for key in dotted)
        assert options or dotted or find_key(ours.partition(" ")[0])


# The command line of a verb that takes a recipe: flags among overrides


@pytest.mark.parametrize(
    ("arguments", "overrides", "flags"),
    [
        (["seed=1", "-m"], ["seed=1"], ["-m"]),
        (["a=1", "--cfg", "job", "b=2"], ["a=1", "b=2"], ["--cfg", "job"]),
        (["seed=1", "--config-dir", "x", "seed=1"], ["seed=1", "seed=1"], ["--config-dir", "x"]),
        (["--", "seed=1"], ["seed=1"], ["--"]),
        # Hydra names what is not an override.
        (["seed", "~training.steps", "+a=1", "++b=2"], ["seed", "~training.steps", "+a=1", "++b=2"], []),
    ],
)
def test_flags_may_stand_anywhere(arguments, overrides, flags):
    found = read_flags(arguments)
    assert (found.overrides, found.flags) == (overrides, flags)


def test_the_last_of_two_values_counts():
    found = read_flags(["--config-name", "a", "--config-name=b", "-cd", "there", "--config-path=x"])
    assert found.values == {"--config-name": "b", "--config-dir": "there", "--config-path": "x"}


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("runs=~/a", "runs=/home/ada/a"),
        ("runs=~", "runs=/home/ada"),
        ("runs=~bob/a", "runs=~bob/a"),
        ("runs=a~/b", "runs=a~/b"),
        ("runs=", "runs="),
        ("~runs", "~runs"),
    ],
)
def test_the_home_folder_is_put_in(monkeypatch, override, read):
    monkeypatch.setenv("HOME", "/home/ada")
    assert read_flags([override]).overrides == [read]
