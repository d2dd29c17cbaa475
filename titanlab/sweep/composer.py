"""Recipes of many points: Hydra composes each option once, and its results are combined for every point.

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
from titanlab.sweep.space import Values, canonical_text, flattened

Choices = tuple[tuple[str, str], ...]
# A composition, and the nodes of options that replace some of its groups; no composition: options are not combined.
Family = tuple[Composed | None, dict[tuple[str, str], DictConfig]]
_ABSENT = object()
_FIELDS = tuple(field.name for field in dataclasses.fields(Recipe))
# `${model.vocab_size}`; for other interpolations only the beginning matches, and the group is None.
_REFERENCE = re.compile(r"\$\{(?:(\w+)(?:\.\w+)*\})?")


class Composer:
    """Composes the points of one sweep.

    Points with the same option of a group and the same values in it share one object, because creating one takes
    milliseconds: configs are never changed after their creation.

    Args:
        loader: Hydra, with the overrides that all points share.
        points: all points of the sweep; their common options are composed first.
    """

    def __init__(self, loader: Loader, points: Sequence[Values]) -> None:
        self._loader = loader
        self._whole: dict[Choices, Composed | ConfigError] = {}
        self._flat: dict[int, dict[str, Any]] = {}
        self._groups = discover()
        self._root = schema_node(Recipe)
        # Fields of recipes by all that determines them; the keys have the `id` of configs, which stay alive here.
        self._made: dict[tuple[Any, ...], Any] = {}
        self._references: dict[tuple[str, int], frozenset[str] | None] = {}
        self._numbers = {canonical_text(point): number for number, point in enumerate(points)}
        # Points with the same wide options, and own options of the same groups, share one template.
        families: dict[tuple[Choices, frozenset[str]], dict[str, list[str]]] = {}
        for wide, own in dict.fromkeys(map(self._split, points)):
            groups = families.setdefault((wide, frozenset(group for group, _ in own)), {})
            for group, option in own:
                if option not in groups.setdefault(group, []):
                    groups[group].append(option)
        self._families = {key: self._family(key[0], groups) for key, groups in families.items()}

    def value(self, point: Values, key: str) -> Any:
        """A point's value of a key, or the name of a group's option, without composing the point.

        Raises:
            ConfigError: the point cannot be composed.
            KeyError: the point has no such key.
        """
        if key in point:
            return point[key]
        composed, nodes = self._parts(point)
        if key in composed.choices:
            return composed.choices[key]
        # The composed value, before the point's own values are set.
        group, _, rest = key.partition(".")
        config = nodes.get(group, composed.config)
        if id(config) not in self._flat:
            values: Any = OmegaConf.to_container(config, resolve=False)
            self._flat[id(config)] = {name: value for name, value in flattened(values) if value != "???"}
        value = self._flat[id(config)].get(rest if group in nodes else key, _ABSENT)
        # If the point sets a key above or below this one, the composed value is out of date.
        related = (name for name in point if name.startswith(f"{key}.") or key.startswith(f"{name}."))
        is_changed = any(not self._loader.is_group(name) for name in related)
        if is_changed or (isinstance(value, str) and "${" in value):
            config, composed = self._config(point)
            with self._loader.answers_hydra(composed):
                value = OmegaConf.select(config, key, default=_ABSENT)
        if value is _ABSENT:
            raise KeyError(key)
        return value

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
                # The field refers to other fields, or is wrong: the whole recipe, or its error, says more.
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
        """A composed config, and the nodes that replace some of its groups."""
        wide, own = self._split(point)
        template, nodes = self._families.get((wide, frozenset(group for group, _ in own)), (None, {}))
        if template is not None and all(choice in nodes for choice in own):
            return template, {choice[0]: nodes[choice] for choice in own}
        return self._combination((*wide, *own)), {}

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

    def _family(self, wide: Choices, groups: Mapping[str, Sequence[str]]) -> Family:
        """Compose a first combination of options as the template, and the nodes of all other options.

        Options that fill their own groups do not affect each other, so that one composition gives a node of each group.
        """
        first = {group: options[0] for group, options in groups.items()}
        try:
            template = self._combination((*wide, *first.items()))
        except ConfigError as error:
            if find_key(error.key) is None:
                # No option has the key: the shared overrides are wrong, and no combination can be composed.
                self._combination(())
            # Another combination may be valid: compose each one separately.
            return None, {}
        nodes = {(group, option): template.config[group] for group, option in first.items()}
        outside = _outside(template, groups)

        def is_added(choices: Mapping[str, str]) -> bool:
            """Whether a combination was composed, and differs from the template only in its groups."""
            try:
                composed = self._combination((*wide, *choices.items()))
            except ConfigError:
                return False
            if _outside(composed, groups) != outside:
                return False
            for group, option in choices.items():
                nodes.setdefault((group, option), composed.config[group])
            return True

        for turn in range(1, max(map(len, groups.values()), default=1)):
            choices = {group: options[turn % len(options)] for group, options in groups.items()}
            if not is_added(choices):
                for group, option in choices.items():
                    if (group, option) not in nodes:
                        is_added({**first, group: option})
        return template, nodes

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


def _outside(composed: Composed, groups: Iterable[str]) -> str:
    """A text of everything in a composition outside these groups."""
    config: Any = OmegaConf.to_container(composed.config, resolve=False)
    choices = {group: option for group, option in composed.choices.items() if group not in groups}
    return canonical_text([{key: value for key, value in config.items() if key not in groups}, choices])
