"""Errors of Hydra, OmegaConf and files that no command line of tests/cli/test_refusals.py makes."""

import pytest
import yaml
from hydra.errors import HydraException, MissingConfigException, SearchPathException

from titanlab.errors import ConfigError
from titanlab.recipe import composition_errors


def translated(error, overrides=(), flags=None):
    """The text of what an error while composing becomes."""
    with pytest.raises(ConfigError) as raised, composition_errors(overrides, flags):
        raise error
    assert raised.value.__cause__ is error
    return str(raised.value)


def test_what_is_none_of_the_composition_passes():
    for error in (KeyError("x"), BrokenPipeError(32, "Broken pipe"), ConfigError("a", 1, "is wrong", "mend it")):
        with pytest.raises(type(error)) as raised, composition_errors([]):
            raise error
        assert raised.value is error


@pytest.mark.parametrize(
    ("name", "flags", "text"),
    [
        ("config", {"--config-path": "/n"}, "--config-path=/n: has no config.yaml; leave it out, or use --config-dir"),
        ("model/x", {}, "model=x: is no option of this group; known: none"),
        ("lost", {}, "config=lost: is no option of this group; known: none"),
    ],
)
def test_a_config_that_is_missing(name, flags, text):
    assert translated(MissingConfigException("not found", name, None), (), flags) == text


def test_of_many_options_the_first_are_listed():
    options = [f"m{number:02}" for number in range(25)]
    text = translated(MissingConfigException("not found", "model/x", options))
    assert text.endswith("known: " + ", ".join(options[:20]) + " and 5 more; see `titanlab train --help`")


def test_files_and_folders_that_cannot_be_read_are_named():
    missing = FileNotFoundError(2, "No such file or directory", "x.yaml")
    assert translated(missing) == "file=x.yaml: cannot be used (No such file or directory); name another"
    text = "--config-dir=/n: is no folder; give a folder of groups"
    assert translated(SearchPathException("x"), (), {"--config-dir": "/n"}) == text
    with pytest.raises(yaml.YAMLError) as raised:
        yaml.safe_load("a: 1\nb: [")
    assert translated(raised.value).startswith("file=<unicode string>:2: is no YAML (expected the node content")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            HydraException("what about 'seed'.\nMore"),
            "seed=3: what about 'seed'; compare with `titanlab train --cfg job`",
        ),
        (
            HydraException("Something else."),
            "arguments=model=debug seed=3: Something else; see `titanlab train --help`",
        ),
        (OverflowError("too big"), "arguments=model=debug seed=3: too big; see `titanlab train --help`"),
    ],
)
def test_a_text_that_nobody_knows_is_told_with_the_override_that_it_quotes(error, text):
    assert translated(error, ["model=debug", "seed=3"]) == text
