"""Registers schemas and config folders with Hydra, and converts composed configs to recipes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf, open_dict

import titanlab
from titanlab.errors import ConfigError
from titanlab.options import PLUS, Option, combination, conf_packages, discover
from titanlab.profiler.off_schema import Off
from titanlab.recipe.composition import hydra_internal, strangers
from titanlab.recipe.composition.keys import unknown_key
from titanlab.recipe.composition.sweeper import Space
from titanlab.recipe.recipe import Recipe


def register() -> None:
    """Register schemas and folders of other packages with Hydra, and keep it from running code that a YAML names."""
    hydra_internal.replace_sources()
    strangers.replace_resolvers()
    store = ConfigStore.instance()
    if store.get_type("recipe_schema.yaml") is not ObjectType.CONFIG:
        store.store(name="recipe_schema", node=Recipe)
        store.store(group="hydra/sweeper", name="space", node=Space)
    for group, kinds in discover().items():
        for option in kinds.values():
            if store.get_type(f"{group}/{option.schema_name}.yaml") is not ObjectType.CONFIG:
                # An empty node: `StructuredConfigSource` makes the real one when a composition uses it.
                store.store(group=group, name=option.schema_name, node={})
    Plugins.instance().register(PackagesOnSearchPath)


def conf_folder() -> Path:
    """The folder of the config groups: beside the package in a clone, inside it in an installed wheel."""
    package = Path(titanlab.__file__).parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def to_recipe(config: DictConfig, choices: Mapping[str, Any], name: str | None) -> Recipe:
    """Convert a composed config to dataclasses; from here on no code uses a DictConfig.

    Args:
        choices: the composed option of each group.
        name: name of the composed config, for errors.

    Raises:
        ConfigError: a value breaks its schema's rule, an added key belongs to no schema, or a group has no schema.
    """
    if OmegaConf.get_type(config) is not Recipe:
        raise ConfigError("--config-name", name, "composes no recipe", "begin its defaults with recipe_schema")
    groups = discover()
    if OmegaConf.is_missing(config, "profiler"):
        # A config of the user's own that is older than the group.
        with open_dict(config):
            config.profiler = OmegaConf.structured(Off)
    for group, kinds in groups.items():
        if group in config and not OmegaConf.is_missing(config, group):
            _check_schema(OmegaConf.get_type(config, group), group, kinds, choices.get(group))
    recipe: Recipe = OmegaConf.to_object(config)  # type: ignore[assignment]
    for group, kinds in groups.items():
        _check_kind(getattr(recipe, group, None), group, kinds)
    _check_keys(recipe, "")
    return recipe


def to_group(node: DictConfig, group: str, kinds: Mapping[str | None, Option]) -> Any:
    """Convert the node of one group to the dataclass of its schema.

    Raises:
        ConfigError: in the same cases as `to_recipe`.
    """
    _check_schema(OmegaConf.get_type(node), group, kinds, None)
    config = OmegaConf.to_object(node)
    _check_kind(config, group, kinds)
    _check_keys(config, f"{group}.")
    return config


class PackagesOnSearchPath(SearchPathPlugin):
    """Adds the folders with which other packages extend titanlab's groups, and the folder of `--config-dir`."""

    # A class attribute, because Hydra makes the plugin itself, without arguments.
    _folder: ClassVar[str | None] = None

    @classmethod
    @contextlib.contextmanager
    def extended_by(cls, folder: str | None) -> Iterator[None]:
        """Append a folder to each search path that is made within the block."""
        cls._folder = folder
        try:
            yield
        finally:
            cls._folder = None

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the folders after titanlab's own."""
        for package in conf_packages():
            search_path.append(provider=package, path=f"pkg://{package}")
        if self._folder is not None:
            search_path.append(provider="command-line", path=f"file://{Path(self._folder).absolute()}")


def _check_schema(schema: type | None, group: str, kinds: Mapping[str | None, Option], choice: str | None) -> None:
    """Check that a group's value has one of the group's schemas, which have implementations."""
    if schema not in [option.schema for option in kinds.values()] and not _is_combination(schema, group):
        names = " or ".join(f"[{option.schema_name}, _self_]" for option in kinds.values())
        raise ConfigError(
            group, choice, "is made without a schema of this group", f"begin its YAML with defaults: {names}"
        )
    contract, bases = f"titanlab.{group}.contract", () if schema is None else schema.__mro__
    if None not in kinds and contract not in [base.__module__ for base in bases]:
        # Only a package that was written for another version of titanlab has such a config.
        rule = f"has a config ({schema.__module__}) that inherits from no class of {contract}"
        raise ConfigError(group, choice, rule, "use a version of its package for this titanlab; docs/extending.md")
    if schema is not None and (lacking := sorted(getattr(schema, "__abstractmethods__", ()))):
        rule = f"has a config ({schema.__module__}) without {' and '.join(lacking)}, which {contract} asks for"
        raise ConfigError(group, choice, rule, "define what it lacks; docs/extending.md")


def _is_combination(schema: type | None, group: str) -> bool:
    """Whether a schema is that of several options of a group."""
    kind = getattr(schema, "kind", None)
    several = combination(group, kind) if isinstance(kind, str) and PLUS in kind else None
    return several is not None and several.schema is schema


def _check_kind(config: Any, group: str, kinds: Mapping[str | None, Option]) -> None:
    """Check that a group's `kind` is its schema's: it only informs readers of a frozen recipe, and selects nothing."""
    expected = next((option.kind for option in kinds.values() if option.schema is type(config)), None)
    if _is_combination(type(config), group):
        expected = type(config).__dataclass_fields__["kind"].default
        for field in dataclasses.fields(config)[1:]:
            part = getattr(config, field.name)
            _check_schema(type(part), group, kinds, field.name)
            _check_kind(part, group, kinds)
    kind = getattr(config, "kind", expected)
    if kind != expected:
        rule = f"says which schema the group has, and it has that of {expected}"
        raise ConfigError(f"{group}.kind", kind, rule, f"leave it out, and choose with {group}=…")


def _check_keys(node: Any, prefix: str) -> None:
    """Check that every key belongs to a schema: `+key=value` can add keys that nothing reads."""
    fields = {field.name for field in dataclasses.fields(node)}
    for name, value in vars(node).items():
        if name not in fields:
            raise unknown_key(prefix + name, value)
        if dataclasses.is_dataclass(value):
            _check_keys(value, f"{prefix}{name}.")
