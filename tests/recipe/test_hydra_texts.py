"""Every text of Hydra's that is recognised, as the installed Hydra words it."""

from __future__ import annotations

from pathlib import Path

import pytest

from titanlab.errors import ConfigError
from titanlab.recipe import Loader, read_flags
from titanlab.recipe.hydra_errors import read_message

FILES = {
    "model/extra.yaml": "defaults: [debug, _self_]\nunknown: 1\n",
    "model/early.yaml": "defaults:\n  - override /precision: bf16\n  - debug\n",
    "model/lost.yaml": "defaults: [nowhere, _self_]\n",
    "recipe/again.yaml": "# @package _global_\ndefaults: [/model: llama_2m]\n",
    "recipe/keys.yaml": "training: {steps: 5}\n",
    "recipe/chosen.yaml": "defaults: [override /model: llama_5m]\n",
    "recipe/added.yaml": "defaults: [/model: llama_5m]\n",
    "experiment/mine.yaml": "training: {steps: 5}\n",
    "recipe/early.yaml": "# @package _global_\ndefaults:\n  - override /precision: bf16\n  - /model: debug\n",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Configs with mistakes."""
    root = tmp_path_factory.mktemp("configs")
    for name, text in FILES.items():
        path = root / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("overrides", "key", "rule", "cure"),
    [
        (["seed=0,1"], "seed", "is several values", "add -m to run them all"),
        (["optimizer.lr=range(1,3)"], "optimizer.lr", "is several values", "add -m to run them all"),
        (["+seed=1"], "+seed", "is in the recipe already", "try seed=1"),
        (["+model=llama_5m"], "+model", "is in the recipe already", "try model=llama_5m"),
        (["model=null"], "model", "is no option of a group", "--help"),
        (["model=extra"], "model.unknown", "is no key of this recipe, and model/extra.yaml sets it", ""),
        (["model=lost"], "model", "there is no such config, which model/lost names", "mend model/lost.yaml"),
        (["+recipe=early"], "override /precision", "comes before what it is to override", "mend|end of the defaults"),
        (["+recipe=again"], "model", "is chosen in a second defaults list, without override", "override /model: "),
        (
            ["seed=3", "+recipe=again"],
            "model",
            "is chosen in a second defaults list, without override",
            "override /model: ",
        ),
        # Without the line `# @package _global_`: Hydra itself says "Key 'recipe' is not in struct" at best.
        (
            ["+recipe=keys"],
            "recipe",
            "has its keys below recipe",
            "first line of recipe/keys.yaml: # @package _global_",
        ),
        (["+recipe=chosen"], "recipe", "has its keys below recipe", "recipe/chosen.yaml: # @package _global_"),
        (["seed=1", "+recipe=added"], "recipe", "has its keys below recipe", "recipe/added.yaml: # @package _global_"),
        (["+experiment=mine"], "experiment", "has its keys below experiment", "experiment/mine.yaml: # @package"),
        (["~training.nope"], "~training.nope", "takes out what is not there", ""),
        (["recipe=quickstart"], "recipe", "is of a group that is not in every recipe", r"try \+recipe=quickstart"),
        (["nothing=1"], "nothing", "is no key", ""),
    ],
)
def test_a_text_is_recognised(folder, overrides, key, rule, cure):
    loader = Loader(read_flags([*overrides, "--config-dir", str(folder)]), overrides)
    with pytest.raises(ConfigError) as caught:
        loader.recipe()
    assert caught.value.key == key
    assert rule in caught.value.rule
    assert any(part.replace("\\", "") in caught.value.cure for part in cure.split("|"))


def test_a_text_that_nobody_knows_is_told_with_the_override_that_it_quotes():
    error = read_message("Something about 'seed'. And more\nof it", ["model=debug", "seed=3"])
    assert (error.key, error.value, error.rule) == ("seed", "3", "Something about 'seed'. And more")
    assert read_message("Something else.", ["seed=3"]).key == "arguments"
