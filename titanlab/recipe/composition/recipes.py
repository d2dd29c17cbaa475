"""Composed configs as recipes: schemas and folders that Hydra is shown, and what a config has to be to be a recipe."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf

import titanlab
from titanlab.errors import ConfigError
from titanlab.options import conf_packages, discover
from titanlab.recipe.composition.errors import unknown_key
from titanlab.recipe.composition.strangers import guard_hydra
from titanlab.recipe.composition.sweeper import Space
from titanlab.recipe.recipe import Recipe


def register() -> None:
    """Make schemas and the folders of other packages known to Hydra, and have it run no code of a YAML."""
    guard_hydra()
    store = ConfigStore.instance()
    store.store(name="recipe_schema", node=Recipe)
    store.store(group="hydra/sweeper", name="space", node=Space)
    for group, kinds in discover().items():
        for found in kinds.values():
            store.store(group=group, name=found.schema_name, node=found.schema)
    Plugins.instance().register(PackagesOnSearchPath)


def conf_folder() -> Path:
    """The folder of the config groups: beside the package in a clone, inside it in an installed wheel."""
    package = Path(titanlab.__file__).parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def to_recipe(config: DictConfig, choices: Mapping[str, Any], name: str | None) -> Recipe:
    """A composed config as dataclasses; no DictConfig goes further than this.

    Args:
        choices: option by group, as they were composed.
        name: of the config that was composed, for messages.

    Raises:
        ConfigError: a value breaks its schema's rule, a key that was added belongs to no schema, or a group's
            value was made without one.
    """
    if OmegaConf.get_type(config) is not Recipe:
        raise ConfigError("--config-name", name, "composes no recipe", "begin its defaults with recipe_schema")
    _hold_schemas(config, choices)
    recipe: Recipe = OmegaConf.to_object(config)  # type: ignore[assignment]
    _hold_kinds(recipe)
    _hold_keys(recipe, "")
    return recipe


class PackagesOnSearchPath(SearchPathPlugin):
    """Adds the folders with which other packages extend our groups."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append them behind our own."""
        for package in conf_packages():
            search_path.append(provider=package, path=f"pkg://{package}")


def _hold_schemas(config: DictConfig, choices: Mapping[str, Any]) -> None:
    """The rule that every group's value is of one of its schemas: others have no code."""
    for group, kinds in discover().items():
        if group not in config or OmegaConf.is_missing(config, group):
            continue
        if OmegaConf.get_type(config, group) not in [each.schema for each in kinds.values()]:
            names = " or ".join(f"[{each.schema_name}, _self_]" for each in kinds.values())
            rule = "is made without a schema of this group"
            raise ConfigError(group, choices.get(group), rule, f"begin its YAML with defaults: {names}")


def _hold_kinds(recipe: Recipe) -> None:
    """The rule that a group's `kind` is that of its schema: it is there for those who read a frozen recipe."""
    for group, kinds in discover().items():
        value = getattr(recipe, group, None)
        expected = next((each.kind for each in kinds.values() if each.schema is type(value)), None)
        given = getattr(value, "kind", expected)
        if given != expected:
            rule = f"says which schema the group has, and it has that of {expected}"
            raise ConfigError(f"{group}.kind", given, rule, f"leave it out, and choose with {group}=…")


def _hold_keys(node: Any, prefix: str) -> None:
    """The rule that a key belongs to a schema: `+key=value` adds others, which nothing would read."""
    fields = {field.name for field in dataclasses.fields(node)}
    for name, value in vars(node).items():
        if name not in fields:
            raise unknown_key(prefix + name, value)
        if dataclasses.is_dataclass(value):
            _hold_keys(value, f"{prefix}{name}.")
