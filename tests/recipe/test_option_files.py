"""The YAMLs of options hold only what differs from the defaults of their dataclasses.

Recipes and sweeps are not options: they state what a run depends on, whatever the options' defaults are.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from titanlab.options import discover, schema_of
from titanlab.recipe import conf_folder, schema_node

FILES = sorted(path for group in discover() for path in (conf_folder() / group).glob("*.yaml"))


def contents(path: Path) -> tuple[list[str], DictConfig]:
    """The defaults list of an option's file, and its own keys."""
    keys = OmegaConf.load(path)
    assert isinstance(keys, DictConfig)
    return list(keys.pop("defaults")), keys


def inherited(path: Path) -> Any:
    """The values that an option has without its file's own keys: of a schema, or of another option."""
    (base, own), _ = contents(path)
    assert own == "_self_"
    group = path.parent.name
    if base.endswith("schema"):
        return schema_node(schema_of(group, base.removesuffix("schema").removesuffix("_") or None))
    option = path.with_name(f"{base}.yaml")
    return OmegaConf.merge(inherited(option), contents(option)[1])


def leaves(keys: DictConfig, prefix: str = "") -> Iterator[str]:
    for name, value in keys.items_ex(resolve=False):
        if isinstance(value, DictConfig) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def plain(config: Any, key: str) -> Any:
    value = config
    for name in key.split("."):
        value = None if OmegaConf.is_missing(value, name) else value._get_node(name)
    return OmegaConf.to_container(OmegaConf.create({"value": value}), resolve=False)


def repeated(path: Path) -> list[str]:
    """The keys of a file that can be deleted without a change of the option's values."""
    _, keys = contents(path)
    base = inherited(path)
    merged = OmegaConf.merge(base, keys)
    return [key for key in leaves(keys) if plain(base, key) == plain(merged, key)]


def test_an_option_repeats_no_default():
    assert len(FILES) > 90
    found = [f"conf/{path.parent.name}/{path.name}: {key}" for path in FILES for key in repeated(path)]
    assert not found, "delete these keys, whose values are the defaults:\n" + "\n".join(found)
