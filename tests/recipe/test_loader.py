"""One loader composes single runs and points; what a process keeps never shows; hidden options are refused."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path

import hydra
import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

import titanlab
from tests.refusals import refusal
from titanlab.errors import ConfigError
from titanlab.recipe import Loader, hydra_internal, read_flags

PACKAGE = Path(titanlab.__file__).parent


def loader(*arguments: str) -> Loader:
    flags = read_flags(arguments)
    return Loader(flags, flags.overrides)


def test_a_file_that_asks_for_several_runs_gives_no_single_one(tmp_path):
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "many.yaml").write_text("# @package _global_\nhydra: {mode: MULTIRUN}\n")
    assert loader("--config-dir", str(tmp_path), "+recipe=many").recipe() is None


def test_what_asks_hydra_is_answered_and_nothing_stays_behind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = HydraConfig.instance().cfg
    recipe = loader("name=${hydra:runtime.choices.model}", "runs=${hydra:runtime.output_dir}").recipe()
    assert recipe is not None
    assert (recipe.name, recipe.runs) == ("debug", str(tmp_path))
    assert HydraConfig.instance().cfg is before
    assert not GlobalHydra.instance().is_initialized()


def test_a_folder_of_one_command_line_is_not_searched_for_the_next(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("defaults: [debug, _self_]\nlayers: 1\n")
    assert "mine" in loader("--config-dir", str(tmp_path)).options("model")
    assert "mine" not in loader().options("model")


def test_internals_of_hydra_are_used_in_one_file():
    users = {path.name for path in PACKAGE.rglob("*.py") if "hydra._internal" in path.read_text()}
    assert users == {"hydra_internal.py"}


def test_an_option_in_quotes_is_chosen(tmp_path):
    (tmp_path / "recipe").mkdir()
    text = '# @package _global_\ndefaults: [quickstart, {override /checkpoint: "off"}, _self_]\n'
    (tmp_path / "recipe" / "mine.yaml").write_text(text)
    recipe = loader("--config-dir", str(tmp_path), "+recipe=mine").recipe()
    assert recipe is not None
    assert recipe.checkpoint.kind == "off"


def test_a_changed_composition_reaches_no_other():
    first = loader("+recipe=quickstart", "tracker=[tensorboard,jsonl]").compose(()).whole
    expected = copy.deepcopy(first)
    first.training.steps = 12345
    first.hydra.job.name = "changed"
    del first.model
    OmegaConf.set_readonly(first, True)
    again = loader("+recipe=quickstart", "tracker=[tensorboard,jsonl]").compose(()).whole
    assert again == expected
    assert OmegaConf.get_type(again.model) is OmegaConf.get_type(expected.model)


def test_a_hydra_of_another_version_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(hydra, "__version__", "1.5.0")
    assert refusal(importlib.reload, hydra_internal) == (
        'hydra-core=1.5.0: titanlab needs Hydra 1.3 or 1.4; pip install "hydra-core>=1.3.2,<1.5"'
    )


def with_option(folder: Path, path: str, text: str) -> str:
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_text(text)
    return str(folder)


DEBUG = "defaults: [llama_schema, _self_]\ndim: 32\nlayers: 3\nheads: 4\nkv_heads: 1\nffn_dim: 96\nvocab_size: 64\n"


@pytest.mark.parametrize(
    ("file", "text", "chosen", "hidden"),
    [
        ("model/mine.yaml", "defaults: [llama_2m, _self_]\n", "model=mine", "model/llama_2m"),
        ("tracker/unused.yaml", "", "tracker=[tensorboard,jsonl]", "tracker/jsonl"),
    ],
)
def test_an_option_that_a_chosen_one_begins_with_or_is_made_of_is_not_hidden(tmp_path, file, text, chosen, hidden):
    """tests/cli/test_refusals.py has the line of a chosen one that is hidden."""
    folder = with_option(tmp_path, file, text)
    with_option(tmp_path, f"{hidden}.yaml", "kind: other\n")
    with pytest.raises(ConfigError, match=f"^{hidden.replace('/', '=')}: .*{hidden}.yaml is never read"):
        loader("--config-dir", folder, chosen).recipe()


def test_hidden_options_that_nothing_chooses_or_that_say_the_same_are_allowed(tmp_path):
    folder = with_option(tmp_path, "model/llama_2m.yaml", DEBUG)
    original = (PACKAGE.parent / "conf" / "model" / "debug.yaml").read_text()
    with_option(tmp_path, "model/debug.yaml", original + "# A copy.\n")
    recipe = loader("--config-dir", folder).recipe()
    assert recipe is not None
    assert recipe.model.layers == 2
    assert loader("--config-dir", str(PACKAGE.parent / "conf")).recipe() is not None


@pytest.mark.parametrize("content", [b"dim: [1\n", b"- a\n- b\n"])
def test_a_hidden_file_that_cannot_be_read_is_one_line(tmp_path, content):
    folder = with_option(tmp_path, "model/debug.yaml", "")
    (tmp_path / "model" / "debug.yaml").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        loader("--config-dir", folder).recipe()
    assert str(tmp_path / "model" / "debug.yaml") in str(caught.value)
    assert "\n" not in str(caught.value)
