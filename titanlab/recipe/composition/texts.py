"""What is text by the type of its key is the text as typed in a YAML; `null` is still null.

YAML reads a scalar before anything asks for its type: `5e2` is 500.0, `12:00:00` 43200, `off` false, `017` 15.
`typed_overrides.py` does for the command line what this does for files. OmegaConf's reader of YAML has no public name.
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Iterator
from typing import Any, TextIO

import yaml
from omegaconf._utils import get_yaml_loader

from titanlab.options import combining_groups, discover
from titanlab.recipe.composition.keys import known_keys

_SWEEPER = "hydra.sweeper"
_TEXT = "tag:yaml.org,2002:str"
_READ = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "bool"))


def load(source: str | TextIO, name: str) -> Any:
    """The values of a YAML, which OmegaConf could read too.

    Args:
        name: the key that gets the values; empty for those of a whole recipe.

    Raises:
        yaml.YAMLError: it is no YAML.
    """
    loader = get_yaml_loader()(source)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        for node, key in _scalars(root, name):
            if node.tag in _READ and is_text(key, node.value):
                node.tag = _TEXT
        return loader.construct_document(root)
    finally:
        loader.dispose()


def is_text(name: str, typed: str) -> bool:
    """Whether a key takes a scalar as text. A key that takes truth values too has these from `true` and `false`."""
    kinds = types_of(name)
    return str in kinds and not (bool in kinds and typed.lower() in ("true", "false"))


def types_of(name: str) -> frozenset[Any]:
    """The types of the values of a key, or of the values in its lists and mappings."""
    within, _, key = name.rpartition(":")
    if "defaults" in name.split(".") or (within == _SWEEPER and is_group(key)):
        # Options have names.
        return frozenset([str])
    name = key if within == _SWEEPER else name
    group, _, rest = name.partition(".")
    kind, _, inner = rest.partition(".")
    if inner and group in combining_groups() and kind in discover().get(group, {}):
        name = f"{group}.{inner}"
    known = _known(tuple(option.schema for kinds in discover().values() for option in kinds.values()))
    return known.get(name) or known.get(name.rpartition(".")[0], frozenset())


def is_group(key: str) -> bool:
    return "/" in key or key in discover() or key in ("recipe", "sweeps")


@functools.lru_cache(maxsize=1)
def _known(schemas: tuple[type, ...]) -> dict[str, frozenset[Any]]:
    """The types of each key of these schemas and of the recipe itself, by name."""
    known: dict[str, frozenset[Any]] = {}
    for key in known_keys():
        known[key.name] = known.get(key.name, frozenset()) | frozenset(_leaves(key.declared))
    return known


def _leaves(declared: Any) -> Iterator[Any]:
    parts = typing.get_args(declared)
    if typing.get_origin(declared) in (typing.Union, types.UnionType):
        for part in parts:
            yield from _leaves(part)
    elif typing.get_origin(declared) in (list, dict):
        yield from _leaves(parts[-1])
    else:
        yield declared


def _scalars(node: Any, name: str) -> Iterator[tuple[yaml.ScalarNode, str]]:
    """The scalars of a YAML that are values, or keys of a mapping of texts, with the names of the keys of a recipe."""
    if isinstance(node, yaml.ScalarNode):
        yield node, name
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from _scalars(value, name)
    else:
        # In the space of a sweep, a key has its whole name.
        within = f"{_SWEEPER}:" if name.startswith(_SWEEPER) else f"{name}." if name else ""
        for key, value in node.value:
            if str in types_of(name):
                yield from _scalars(key, name)
            # `<<: *other` has the keys of another mapping.
            yield from _scalars(value, name if key.value == "<<" else f"{within}{key.value}")
