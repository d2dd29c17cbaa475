"""An option that Hydra never reads, since an earlier folder has one of its name, is refused when it is chosen."""

from __future__ import annotations

from pathlib import Path

import pytest

import titanlab
from titanlab.errors import ConfigError
from titanlab.recipe import Loader, read_flags

PACKAGE = Path(titanlab.__file__).parent


def loader(*arguments: str) -> Loader:
    flags = read_flags(arguments)
    return Loader(flags, flags.overrides)


def with_option(folder: Path, path: str, text: str) -> str:
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_text(text)
    return str(folder)


DEBUG = "defaults: [llama_schema, _self_]\ndim: 32\nlayers: 3\nheads: 4\nkv_heads: 1\nffn_dim: 96\nvocab_size: 64\n"


def test_an_option_that_one_of_the_same_name_hides_is_refused(tmp_path):
    folder = with_option(tmp_path, "model/debug.yaml", DEBUG)
    file = tmp_path / "model" / "debug.yaml"
    text = f"^model=debug: {file} is never read: .*/conf has an option of that name; .*my_debug"
    # Chosen by config.yaml, on the command line, and for all of a sweep.
    for words in ([], ["model=debug"]):
        with pytest.raises(ConfigError, match=text):
            loader("--config-dir", folder, *words).recipe()
    with pytest.raises(ConfigError, match=text):
        loader("--config-dir", folder).base()
    with pytest.raises(ConfigError, match=text):
        loader(f"hydra.searchpath=[{folder}]").recipe()


@pytest.mark.parametrize(
    ("file", "text", "chosen", "hidden"),
    [
        ("model/mine.yaml", "defaults: [llama_2m, _self_]\n", "model=mine", "model/llama_2m"),
        ("tracker/unused.yaml", "", "tracker=[tensorboard,jsonl]", "tracker/jsonl"),
    ],
)
def test_so_is_one_that_a_chosen_option_begins_with_or_is_made_of(tmp_path, file, text, chosen, hidden):
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


@pytest.mark.parametrize("content", [b"dim: [1\n", b"\x00\xff", b"- a\n- b\n", b""])
def test_a_hidden_file_that_cannot_be_read_is_one_line(tmp_path, content):
    folder = with_option(tmp_path, "model/debug.yaml", "")
    (tmp_path / "model" / "debug.yaml").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        loader("--config-dir", folder).recipe()
    assert str(tmp_path / "model" / "debug.yaml") in str(caught.value)
    assert "\n" not in str(caught.value)
