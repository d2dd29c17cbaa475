"""Fields of recipes, each made once for all points of a sweep that share it.

To make a recipe of a composed config takes milliseconds. Points that choose the same option of a group, and give the
group the same values, share the object that it becomes: nothing changes a config.
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
from titanlab.sweep.study.space import same

_FIELDS = tuple(field.name for field in dataclasses.fields(Recipe))
# `${model.vocab_size}`; of any other interpolation only the beginning matches.
_REFERENCE = re.compile(r"\$\{(?:(\w+)(?:\.\w+)*\})?")

Keys = Mapping[str, tuple[Any, ...]]
"""By field of a recipe, what decides about its value."""


class SharedFields:
    """Makes recipes of fields; configs that it has been shown must stay alive, and be left as they are."""

    def __init__(self) -> None:
        self._groups = discover()
        self._made: dict[tuple[Any, ...], Any] = {}
        self._references: dict[tuple[str, int], frozenset[str] | None] = {}
        self._root = OmegaConf.structured(Recipe)

    def keys(
        self, config: DictConfig, nodes: Mapping[str, DictConfig], values: Sequence[tuple[str, Any]]
    ) -> Keys | None:
        """What decides about each field of a point's recipe; None where that cannot be said field by field.

        Args:
            config: what was composed.
            nodes: what stands in place of some of its groups.
            values: what the point sets, by key.
        """
        given: dict[str, tuple[Any, ...]] = {}
        for key, value in values:
            name, text = key.partition(".")[0], same(value)
            if name not in _FIELDS or key in self._groups or "${" in text:
                return None
            given[name] = (*given.get(name, ()), key, text)
        keys = {name: (name, id(nodes.get(name, config)), given.get(name)) for name in _FIELDS}
        complete: dict[str, tuple[Any, ...]] = {}
        for name, own in keys.items():
            references = self._referred(name, nodes.get(name, config))
            if references is None or any(self._referred(each, nodes.get(each, config)) for each in references):
                return None
            complete[name] = (own, *(keys[each] for each in sorted(references)))
        return complete

    def recipe(
        self, keys: Keys, config: DictConfig, nodes: Mapping[str, DictConfig], values: Sequence[tuple[str, Any]]
    ) -> Recipe | None:
        """The recipe of a point; None where it has to be composed whole, such as to say what is wrong with it."""
        try:
            for name, key in keys.items():
                if key not in self._made:
                    if len(key) > 1:
                        return None  # It refers to other fields.
                    own = [(each, value) for each, value in values if each.partition(".")[0] == name]
                    self._made[key] = self._field(name, nodes.get(name), config, own)
            return Recipe(**{name: self._made[key] for name, key in keys.items()})
        # The last two: a number of too many digits.
        except (ConfigError, OmegaConfBaseException, ValueError, OverflowError):
            return None

    def keep(self, keys: Keys, recipe: Recipe) -> None:
        """Keep the fields of a recipe that was composed whole."""
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
        """Other fields that a field's values refer to; None for interpolations that may refer to anything."""
        known = (name, id(source))
        if known not in self._references:
            plain: Any = OmegaConf.to_container(source, resolve=False)
            text = str(plain.get(name) if OmegaConf.get_type(source) is Recipe else plain)
            names = {match[1] for match in _REFERENCE.finditer(text)}
            self._references[known] = frozenset(names) if names <= set(_FIELDS) else None
        return self._references[known]
