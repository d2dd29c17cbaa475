"""Fields of recipes, each created once for all points of a sweep that share it.

Creating a recipe from a composed config takes milliseconds. Points with the same option of a group and the same values
in it share one object: configs are never changed after their creation.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from titanlab.errors import ConfigError
from titanlab.options import discover
from titanlab.recipe.composition.recipes import to_group
from titanlab.recipe.recipe import Recipe
from titanlab.sweep.study.space import canonical_text

_FIELDS = tuple(field.name for field in dataclasses.fields(Recipe))
# `${model.vocab_size}`; of other interpolations only the beginning matches, so that the group is None.
_REFERENCE = re.compile(r"\$\{(?:(\w+)(?:\.\w+)*\})?")

Keys = Mapping[str, tuple[Any, ...]]
"""For each field of a recipe, everything that determines its value."""


class SharedFields:
    """Creates recipes from fields; configs that were passed to it must stay alive (`id` is their key) and unchanged."""

    def __init__(self) -> None:
        self._groups = discover()
        self._made: dict[tuple[Any, ...], Any] = {}
        self._references: dict[tuple[str, int], frozenset[str] | None] = {}
        self._root = OmegaConf.structured(Recipe)

    def keys(
        self, config: DictConfig, nodes: Mapping[str, DictConfig], values: Sequence[tuple[str, Any]]
    ) -> Keys | None:
        """The key of each field of a point's recipe; None if fields cannot be determined separately.

        Args:
            config: the composed config.
            nodes: replacements for some of its groups.
            values: the point's own values, by key.
        """
        overrides: dict[str, tuple[Any, ...]] = {}
        for key, value in values:
            name, text = key.partition(".")[0], canonical_text(value)
            if name not in _FIELDS or key in self._groups or "${" in text:
                return None
            overrides[name] = (*overrides.get(name, ()), key, text)
        keys = {name: (name, id(nodes.get(name, config)), overrides.get(name)) for name in _FIELDS}
        complete: dict[str, tuple[Any, ...]] = {}
        for name, own in keys.items():
            references = self._referred(name, nodes.get(name, config))
            if references is None or any(self._referred(other, nodes.get(other, config)) for other in references):
                return None
            complete[name] = (own, *(keys[other] for other in sorted(references)))
        return complete

    def recipe(
        self, keys: Keys, config: DictConfig, nodes: Mapping[str, DictConfig], values: Sequence[tuple[str, Any]]
    ) -> Recipe | None:
        """The recipe of a point; None if it must be composed as a whole, for example to explain an error in it."""
        try:
            for name, key in keys.items():
                if key not in self._made:
                    if len(key) > 1:
                        return None  # The field refers to other fields.
                    own = [(path, value) for path, value in values if path.partition(".")[0] == name]
                    self._made[key] = self._field(name, nodes.get(name), config, own)
            return Recipe(**{name: self._made[key] for name, key in keys.items()})
        # ValueError and OverflowError: a number has too many digits.
        except (ConfigError, OmegaConfBaseException, ValueError, OverflowError):
            return None

    def keep(self, keys: Keys, recipe: Recipe) -> None:
        """Keep the fields of a recipe that was composed as a whole."""
        for name, key in keys.items():
            self._made.setdefault(key, getattr(recipe, name))

    def _field(self, name: str, node: DictConfig | None, config: DictConfig, own: Sequence[tuple[str, Any]]) -> Any:
        if name not in self._groups:
            for key, value in own:
                OmegaConf.update(self._root, key, value, merge=True)
            return self._root[name] if own else config[name]
        node = config[name] if node is None else node
        if own:
            node = copy.deepcopy(node)
        for key, value in own:
            OmegaConf.update(node, key.partition(".")[2], value, merge=True)
        return to_group(node, name, self._groups[name])

    def _referred(self, name: str, source: DictConfig) -> frozenset[str] | None:
        """The other fields to which a field's values refer; None if an interpolation may refer to anything."""
        known = (name, id(source))
        if known not in self._references:
            plain: Any = OmegaConf.to_container(source, resolve=False)
            text = str(plain.get(name) if OmegaConf.get_type(source) is Recipe else plain)
            names = {match[1] for match in _REFERENCE.finditer(text)}
            self._references[known] = frozenset(names) if names <= set(_FIELDS) else None
        return self._references[known]
