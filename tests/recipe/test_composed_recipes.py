"""Composed configs become dataclasses, each value of a group with a schema of that group; where folders are looked up."""

from dataclasses import dataclass

import pytest
import yaml
from hydra.errors import HydraException, MissingConfigException, SearchPathException
from omegaconf import open_dict

import titanlab
from tests import tiny
from tests.refusals import refusal
from titanlab.errors import ConfigError
from titanlab.options import Option, discover, option
from titanlab.recipe import compose as recipes
from titanlab.recipe import composition_errors, conf_folder, schema_node, to_group, to_recipe
from titanlab.techniques.optimizer.contract import Scheduled
from titanlab.techniques.optimizer.optimizers_schema import AdamW

KINDS = discover()["optimizer"]


@pytest.mark.parametrize("place", ["", "schedule"])
def test_a_key_of_no_schema_is_refused_wherever_it_was_added(place):
    node = schema_node(AdamW(lr=1e-3))
    inner = node[place] if place else node
    with open_dict(inner):
        inner.colour = "red"
    key = f"optimizer.{place}.colour" if place else "optimizer.colour"
    assert refusal(to_group, node, "optimizer").startswith(f"{key}=red: is not a key of this recipe")


@option("optimizer", "early")
@dataclass(frozen=True, kw_only=True)
class Foreign:
    kind: str = "early"
    lr: float = 1.0e-3


@option("optimizer", "early")
@dataclass(frozen=True, kw_only=True)
class Incomplete(Scheduled):
    kind: str = "early"
    lr: float = 1.0e-3
    betas: tuple[float, ...] = ()


@pytest.mark.parametrize(
    ("schema", "rule"),
    [
        (
            Foreign,
            (
                "that inherits from no class of titanlab.techniques.optimizer.contract; "
                "use a version of its package for this titanlab; docs/extending.md"
            ),
        ),
        (
            Incomplete,
            (
                "without implementation and state_bytes, which titanlab.techniques.optimizer.contract asks for; "
                "define what it lacks; docs/extending.md"
            ),
        ),
    ],
)
def test_a_config_without_the_contract_of_its_group_is_refusal(tmp_path, monkeypatch, schema, rule):
    early = Option(group="optimizer", kind="early", schema=schema)
    monkeypatch.setattr(recipes, "discover", lambda: {**discover(), "optimizer": {**KINDS, "early": early}})
    config = schema_node(tiny.recipe(tmp_path))
    config.optimizer = schema_node(schema)
    assert refusal(to_recipe, config, {"optimizer": "early"}, "config") == (
        f"optimizer=early: has a config ({__name__}) {rule}"
    )


def test_groups_are_inside_an_installed_package_and_beside_that_of_a_clone(tmp_path, monkeypatch):
    monkeypatch.setattr(titanlab, "__file__", str(tmp_path / "titanlab" / "__init__.py"))
    (tmp_path / "conf").mkdir()
    assert conf_folder() == tmp_path / "conf"
    (tmp_path / "titanlab" / "conf").mkdir(parents=True)
    assert conf_folder() == tmp_path / "titanlab" / "conf"


# Errors that no command line of tests/cli/test_refusals.py makes


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
        ("model/x", {}, "model=x: is not an option of this group; known: none"),
        ("lost", {}, "config=lost: is not an option of this group; known: none"),
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
    text = "--config-dir=/n: is not a folder; give a folder that has model, data and other groups of options"
    assert translated(SearchPathException("x"), (), {"--config-dir": "/n"}) == text
    with pytest.raises(yaml.YAMLError) as raised:
        yaml.safe_load("a: 1\nb: [")
    assert translated(raised.value).startswith("file=<unicode string>:2: is not YAML (expected the node content")


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
