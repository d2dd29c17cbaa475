"""What Hydra prints for flags that start nothing, and that the process is as before."""

from __future__ import annotations

import os
import sys

import pytest
import yaml

from titanlab.cli import compose, main
from titanlab.errors import ConfigError
from titanlab.recipe import read_flags


def state():
    return list(sys.argv), os.environ.get("HYDRA_FULL_ERROR"), sys.stdout, sys.stderr


@pytest.mark.parametrize(
    "arguments", ["--cfg job", "--cfg job model.dim=x", "--info defaults", "--cfg job +recipe=nonesuch"]
)
def test_the_process_is_as_before(here, monkeypatch, arguments):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    before = state()
    main(["train", *arguments.split()])
    assert state() == before
    assert list(here.iterdir()) == []


def test_hydra_that_exits_with_an_error_is_one_line(monkeypatch):
    def gives_up():
        sys.stderr.write("usage: …\n\nthe reason\n")
        raise SystemExit(2)

    monkeypatch.setattr(compose.hydra, "main", lambda **given: lambda function: gives_up)
    with pytest.raises(ConfigError) as refused:
        compose.answer(read_flags(["--hydra-help"]))
    assert str(refused.value) == "arguments=--hydra-help: the reason; see `titanlab train --help`"


def test_the_help_names_no_schemas(here, shown):
    """A person chooses options; only YAML files begin with a schema."""
    out = shown("train", "--help")
    assert "parallelism: " in out
    assert "_schema" not in out


def test_hydras_help_names_no_flag_that_is_refused(here, shown):
    """Hydra advises `titanlab train -sc install=bash`, after which TAB completes nothing."""
    out = shown("train", "--hydra-help")
    assert "install=" not in out
    assert "rerun" not in out
    assert out.endswith('For TAB in the shell: eval "$(titanlab completion bash)"\n')
    # What stands around them is there.
    assert "--multirun,-m : " in out
    assert "--config-path,-cp : " in out
    assert "--info,-i : " in out


@pytest.mark.parametrize("terminal", [False, True])
def test_a_config_in_a_pipe_is_yaml_whose_control_characters_are_escapes(here, shown, monkeypatch, terminal):
    (here / "own" / "recipe").mkdir(parents=True)
    text = '# @package _global_\ndefaults: [quickstart, _self_]\nname: "a\\eb\\u202Ec"\n'
    (here / "own" / "recipe" / "mine.yaml").write_text(text)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    out = shown("train", "--config-dir", "own", "+recipe=mine", "--cfg", "job")
    # On a terminal, another line may stand before it.
    name = out.partition("name: ")[2].partition("\n")[0]
    assert name
    assert ("\x1b" in name, "\u202e" in name) == (False, not terminal)
    if not terminal:
        assert yaml.safe_load(out)["name"] == "a\x1bb\u202ec"
