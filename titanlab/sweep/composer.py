"""Composes recipes of many points: Hydra composes each option once, and the results are combined for every point.

One composition by Hydra takes about 0.05 s, too long for each of a thousand points. Almost all points differ only in
values, and in options that fill a group of their own; such an option is composed once. An option that may change other
groups (a recipe, a `@package`, an option with its own defaults) is composed by Hydra in every combination that occurs.
The result equals Hydra's own composition; a test compares the two.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from titanlab.errors import ConfigError
from titanlab.options import discover
from titanlab.recipe import Composed, Loader, Recipe, composition_errors, find_key, schema_node, to_group, to_recipe
from titanlab.sweep.space import Values, canonical_text

Choices = tuple[tuple[str, str], ...]
_FIELDS = tuple(field.name for field in dataclasses.fields(Recipe))
# `${model.vocab_size}`; for other interpolations only `${` matches, and `match[1]` is None.
_REFERENCE = re.compile(r"\$\{(?:(\w+)(?:\.\w+)*\})?")


class Composer:
    """Composes the points of one sweep.

    Points with the same option of a group and the same values in it share one config object: creating one takes
    milliseconds, and configs are never changed after their creation.

    Args:
        loader: Hydra, with the overrides that all points share.
        points: all points of the sweep; the index of a point is its `${hydra:job.num}`.
    """

    def __init__(self, loader: Loader, points: Sequence[Values]) -> None:
        self._loader = loader
        self._whole: dict[Choices, Composed | ConfigError] = {}
        self._groups = discover()
        self._root = schema_node(Recipe)
        # Everything that determines a field → the field. Keys contain `id`s of configs; `_whole` keeps these alive.
        self._made: dict[tuple[Any, ...], Any] = {}
        self._references: dict[tuple[str, int], frozenset[str] | None] = {}
        self._numbers = {canonical_text(point): number for number, point in enumerate(points)}
        # Wide options and an own option (see `_split`) → whether the own option changes only its group.
        self._is_sole: dict[tuple[Choices, tuple[str, str]], bool] = {}

    def is_group(self, key: str) -> bool:
        """Whether a key chooses an option of a group."""
        return self._loader.is_group(key)

    def option(self, point: Values, group: str) -> Any:
        """The option that a point has for a group; None: it has none. ConfigError: its options do not compose."""
        return point[group] if group in point else self._parts(point)[0].choices.get(group)

    def recipe(self, point: Values) -> Recipe:
        """The recipe of a point.

        Raises:
            ConfigError: the point cannot be composed; points with the same wrong field get the same error.
        """
        composed, nodes = self._parts(point)
        values = self._loader.values_of(point)
        keys = self._keys(composed, nodes, values)
        if keys is None:
            return self._whole_recipe(point)
        for name, key in keys.items():
            if key not in self._made and len(key) == 1:
                # ValueError and OverflowError: a number has too many digits.
                with contextlib.suppress(ConfigError, OmegaConfBaseException, ValueError, OverflowError):
                    own = [(path, value) for path, value in values if path.partition(".")[0] == name]
                    self._made[key] = self._field(name, nodes.get(name), composed.config, own)
            if key not in self._made:
                # The field refers to other fields, or is wrong: compose the whole recipe, which raises the error.
                try:
                    recipe = self._whole_recipe(point)
                except ConfigError as error:
                    if error.key.partition(".")[0] == name:
                        self._made[key] = error
                    raise
                for other, other_key in keys.items():
                    self._made.setdefault(other_key, getattr(recipe, other))
            if isinstance(self._made[key], ConfigError):
                raise self._made[key]
        return Recipe(**{name: self._made[key] for name, key in keys.items()})

    def plain_value(self, point: Values, key: str) -> Any:
        """A point's value of a key, before the recipe is checked; None: no value, or the point does not compose."""
        with contextlib.suppress(ConfigError, OmegaConfBaseException):
            config, composed = self._config(point)
            with self._loader.answers_hydra(composed):
                return OmegaConf.select(config, key)
        return None

    def _whole_recipe(self, point: Values) -> Recipe:
        """The recipe of a point, from a config that is not shared with other points."""
        with composition_errors(self._loader.overrides_of(point)):
            config, composed = self._config(point)
            choices = {**composed.choices, **dict(self._loader.choices_of(point))}
            with self._loader.answers_hydra(composed):
                return to_recipe(config, choices, self._loader.config_name)

    def _config(self, point: Values) -> tuple[DictConfig, Composed]:
        """A config for this point alone, and the composition from which it was made."""
        composed, nodes = self._parts(point)
        if composed.asks_hydra:
            # `${hydra:…}` may refer to anything, also to the point's own overrides.
            composed = self._loader.compose(self._loader.overrides_of(point))
            composed.whole.hydra.job.num = self._numbers.get(canonical_text(point), 0)
            return composed.config, composed
        config = copy.deepcopy(composed.config)
        for group, node in nodes.items():
            config[group] = node
        with composition_errors(self._loader.overrides_of(point)):
            for key, value in self._loader.values_of(point):
                OmegaConf.update(config, key, value, merge=True)
        return config, composed

    def _split(self, point: Values) -> tuple[Choices, Choices]:
        """A point's options: those that may change other groups (`wide`), and those that fill only their own."""
        choices = self._loader.choices_of(point)
        wide = tuple(choice for choice in choices if not self._loader.is_own(*choice))
        return wide, tuple(choice for choice in choices if choice not in wide)

    def _parts(self, point: Values) -> tuple[Composed, Mapping[str, DictConfig]]:
        """The composition of a point's wide options, and a config node for each of its own options, by group."""
        wide, own = self._split(point)
        try:
            template = self._combination(wide)
            parts = {choice: self._combination((*wide, choice)) for choice in own}
            if all(self._changes_only_its_group(wide, choice) for choice in own):
                return template, {group: composed.config[group] for (group, _), composed in parts.items()}
        except ConfigError as error:
            # A key may exist only together with another option: compose all options together.
            if find_key(error.key) is None:
                raise
        return self._combination((*wide, *own)), {}

    def _changes_only_its_group(self, wide: Choices, choice: tuple[str, str]) -> bool:
        if (wide, choice) not in self._is_sole:
            both = (self._combination(wide), self._combination((*wide, choice)))
            first, second = (_outside(composed, choice[0]) for composed in both)
            self._is_sole[wide, choice] = first == second
        return self._is_sole[wide, choice]

    def _combination(self, choices: Choices) -> Composed:
        """Hydra's own composition of a combination of options."""
        if choices not in self._whole:
            try:
                self._whole[choices] = self._loader.compose(self._loader.overrides_of(dict(choices)))
            except ConfigError as error:
                self._whole[choices] = error
        composed = self._whole[choices]
        if isinstance(composed, ConfigError):
            raise composed
        return composed

    def _keys(
        self, composed: Composed, nodes: Mapping[str, DictConfig], values: Iterable[tuple[str, Any]]
    ) -> Mapping[str, tuple[Any, ...]] | None:
        """For each field, everything that determines its value; None if fields cannot be determined separately."""
        overrides: dict[str, tuple[Any, ...]] = {}
        for key, value in values:
            name, text = key.partition(".")[0], canonical_text(value)
            if name not in _FIELDS or key in self._groups or "${" in text:
                return None
            overrides[name] = (*overrides.get(name, ()), key, text)
        sources = {name: nodes.get(name, composed.config) for name in _FIELDS}
        keys = {name: (name, id(source), overrides.get(name)) for name, source in sources.items()}
        complete: dict[str, tuple[Any, ...]] = {}
        for name, own in keys.items():
            others = self._referred(name, sources[name])
            if composed.asks_hydra or others is None or any(self._referred(each, sources[each]) for each in others):
                return None
            complete[name] = (own, *(keys[each] for each in sorted(others)))
        return complete

    def _referred(self, name: str, source: DictConfig) -> frozenset[str] | None:
        """The other fields to which a field's values refer; None if an interpolation may refer to anything."""
        known = (name, id(source))
        if known not in self._references:
            plain: Any = OmegaConf.to_container(source, resolve=False)
            text = str(plain.get(name) if OmegaConf.get_type(source) is Recipe else plain)
            names = {match[1] for match in _REFERENCE.finditer(text)}
            self._references[known] = frozenset(names) if names <= set(_FIELDS) else None
        return self._references[known]

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
        return to_group(node, name)


def _outside(composed: Composed, group: str) -> str:
    """Everything in a composition outside this group, as text."""
    config: Any = OmegaConf.to_container(composed.config, resolve=False)
    return canonical_text([{**each, group: None} for each in (config, composed.choices)])
