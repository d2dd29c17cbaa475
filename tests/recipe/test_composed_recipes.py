"""Composed configs become dataclasses, each value of a group with a schema of that group; where folders are looked up."""

from dataclasses import dataclass

import pytest
from omegaconf import OmegaConf, open_dict

import titanlab
from tests import tiny
from titanlab.errors import ConfigError
from titanlab.options import Option, discover, option
from titanlab.recipe import compose as recipes
from titanlab.recipe import conf_folder, schema_node, to_group, to_recipe
from titanlab.techniques.optimizer.contract import Scheduled
from titanlab.techniques.optimizer.optimizers_schema import AdamW
from titanlab.techniques.profiler.profilers_schema import NoProfiling

KINDS = discover()["optimizer"]


def refused(action, *given):
    with pytest.raises(ConfigError) as raised:
        action(*given)
    return str(raised.value)


def test_a_composed_config_becomes_the_recipe(tmp_path):
    recipe = tiny.recipe(tmp_path, shard=2)
    assert to_recipe(schema_node(recipe), {}, "config") == recipe


def test_a_group_becomes_the_dataclass_of_its_schema():
    node = schema_node(AdamW(lr=1e-3, betas=[0.8, 0.9]))
    assert to_group(node, "optimizer") == AdamW(lr=1e-3, betas=[0.8, 0.9])


def test_a_group_without_a_schema_is_told_the_schemas_that_there_are():
    said = refused(to_group, OmegaConf.create({"lr": 1.0, "kind": "adamw"}), "optimizer")
    assert said.startswith("optimizer=null: is made without a schema of this group; begin its YAML with defaults: [")
    assert "[adamw_schema, _self_] or [" in said
    # That of another group is none.
    said = refused(to_group, schema_node(NoProfiling), "optimizer")
    assert said.startswith("optimizer=null: is made without a schema of this group")


@pytest.mark.parametrize("place", ["", "schedule"])
def test_a_key_of_no_schema_is_refused_wherever_it_was_added(place):
    node = schema_node(AdamW(lr=1e-3))
    inner = node[place] if place else node
    with open_dict(inner):
        inner.colour = "red"
    key = f"optimizer.{place}.colour" if place else "optimizer.colour"
    assert refused(to_group, node, "optimizer").startswith(f"{key}=red: is no key of this recipe")


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
def test_a_config_without_the_contract_of_its_group_is_refused(tmp_path, monkeypatch, schema, rule):
    early = Option(group="optimizer", kind="early", schema=schema)
    monkeypatch.setattr(recipes, "discover", lambda: {**discover(), "optimizer": {**KINDS, "early": early}})
    config = schema_node(tiny.recipe(tmp_path))
    config.optimizer = schema_node(schema)
    assert refused(to_recipe, config, {"optimizer": "early"}, "config") == (
        f"optimizer=early: has a config ({__name__}) {rule}"
    )


def test_groups_are_inside_an_installed_package_and_beside_that_of_a_clone(tmp_path, monkeypatch):
    monkeypatch.setattr(titanlab, "__file__", str(tmp_path / "titanlab" / "__init__.py"))
    (tmp_path / "conf").mkdir()
    assert conf_folder() == tmp_path / "conf"
    (tmp_path / "titanlab" / "conf").mkdir(parents=True)
    assert conf_folder() == tmp_path / "titanlab" / "conf"
