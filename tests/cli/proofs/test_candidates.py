"""Recipes to be proved: by name, by overrides, or of a sweep's folder."""

import pytest

from tests import tiny
from tests.sweep.made import Made
from titanlab.cli.candidates import ProofCandidates, choose, is_name, is_recipe, one_recipe, override_of
from titanlab.errors import ConfigError
from titanlab.prove import Candidate


@pytest.mark.parametrize("text", ["quickstart", "a/b", "a.b", "..", "", " quickstart "])
def test_a_word_is_a_name(text):
    assert is_name(text)


@pytest.mark.parametrize("text", ["seed=1", "+recipe=x", "-m", "--only", "~training.steps", "a b", "="])
def test_overrides_and_flags_are_no_names(text):
    assert not is_name(text)


def test_a_name_is_that_of_a_recipe_or_of_a_sweep():
    unknown = ConfigError("recipe", "nope", "is none", "try another")
    assert is_recipe("quickstart")
    assert override_of("quickstart", unknown) == "+recipe=quickstart"
    assert not is_recipe("quickstart_layouts")
    assert override_of("quickstart_layouts", unknown) == "+sweeps=quickstart_layouts"
    assert not is_recipe("nope")
    with pytest.raises(ConfigError) as raised:
        override_of("nope", unknown)
    assert raised.value is unknown


def chosen(tmp_path):
    recipe = tiny.recipe(tmp_path)
    candidates = [Candidate(run=name, recipe=recipe) for name in ("fsdp-1", "fsdp_tp-2", "tp-3")]
    return ProofCandidates(
        title="mine", candidates=candidates, broken=[("tp=3", "does not fit"), ("cp=3", "does not fit")]
    )


@pytest.mark.parametrize(
    ("word", "runs", "broken"),
    [
        ("", ["fsdp-1", "fsdp_tp-2", "tp-3"], ["tp=3", "cp=3"]),
        ("fsdp", ["fsdp-1", "fsdp_tp-2"], []),
        ("tp", ["fsdp_tp-2", "tp-3"], ["tp=3"]),
        ("cp", [], ["cp=3"]),
    ],
)
def test_runs_with_a_word_in_their_names_are_kept(tmp_path, word, runs, broken):
    found = chosen(tmp_path)
    found.only(word)
    assert [candidate.run for candidate in found.candidates] == runs
    assert [name for name, _ in found.broken] == broken


def test_a_sweep_that_was_submitted_is_taken_from_its_folder(tmp_path):
    made = Made(tmp_path / "runs", "mine")
    first, damaged = made.run("fsdp", shard=2), made.run("tp", tensor=2)
    made.drop("rule", "does not divide", parallelism="tp3", seed=1)
    made.drop("where", "world <= 4", parallelism="fsdp8")
    made.drop("duplicate", "is there twice", seed=0)
    config = (damaged.path / "config.yaml").read_text()
    (damaged.path / "config.yaml").write_text(config.replace("seed: 0", "seed: x"))
    found = choose(["mine"], str(tmp_path / "runs"))
    assert [candidate.run for candidate in found.candidates] == [first.path.name]
    assert found.candidates[0].recipe.layout.shard == 2
    assert (found.title, found.folder) == (f"mine ({made.folder.path})", made.folder.path)
    (run, rule), other = found.broken
    assert run == damaged.path.name
    assert rule.startswith("seed=x: ")
    assert other == ("parallelism=tp3, seed=1", "does not divide")
    assert found.left_out == [("parallelism=fsdp8", "world <= 4"), ("seed=0", "is there twice")]


def test_an_expression_is_one_recipe(tmp_path):
    words = f"model=debug data=synthetic runs={tmp_path} optimizer.schedule.warmup_steps=0"
    found = one_recipe(f"{words} 'name=a-b'")
    assert (found.run, found.recipe.name) == (f"{words} name=a-b", "a-b")
    with pytest.raises(ConfigError, match="describes 2 recipes, and two are compared"):
        one_recipe(f"-m {words} seed=1,2")
