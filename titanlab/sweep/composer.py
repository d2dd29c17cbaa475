"""Recipes of many points: Hydra composes each option once, and its results are combined for every point.

One composition by Hydra takes about 0.05 s, too long for each of a thousand points. Almost all points differ only in
values, and in options that fill a group of their own; such an option is composed once. An option that may change other
groups (a recipe, a `@package`, an option with its own defaults) is composed by Hydra in every combination that occurs.
The result equals Hydra's own composition; a test compares the two.

Points with the same option of a group and the same values in it share one object (`SharedFields`), because creating one
takes milliseconds: configs are never changed after their creation.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from titanlab.errors import ConfigError
from titanlab.options import discover
from titanlab.recipe import Composed, Loader, Recipe, composition_errors, find_key, schema_node, to_group, to_recipe
from titanlab.sweep.space import Values, canonical_text, flattened

Choices = tuple[tuple[str, str], ...]
_ABSENT = object()


class Composer:
    """Composes the points of one sweep.

    Args:
        loader: Hydra, with the overrides that all points share.
        points: all points of the sweep; their common options are composed first.
    """

    def __init__(self, loader: Loader, points: Sequence[Values]) -> None:
        self._loader = loader
        self._families: dict[tuple[Choices, frozenset[str]], _Family] = {}
        self._whole: dict[Choices, Composed | ConfigError] = {}
        self._flat: dict[int, dict[str, Any]] = {}
        self._fields = SharedFields()
        self._numbers = {canonical_text(point): number for number, point in enumerate(points)}
        options: dict[tuple[Choices, frozenset[str]], dict[str, list[str]]] = {}
        for point in points:
            wide, own = self._split(point)
            groups = options.setdefault(_family_of(wide, own), {})
            for group, option in own:
                known = groups.setdefault(group, [])
                if option not in known:
                    known.append(option)
        for key, groups in options.items():
            self._families[key] = self._compose_family(key[0], groups)

    def value(self, point: Values, key: str) -> Any:
        """A point's value of a key, or the name of a group's option, without composing the point.

        Raises:
            ConfigError: the point cannot be composed.
            KeyError: the point has no such key.
        """
        if key in point:
            return point[key]
        wide, own = self._split(point)
        composed, nodes = self._parts(wide, own)
        choices = {**composed.choices, **dict(own)}
        if key in choices:
            return choices[key]
        # The composed value, before the point's own values are set.
        group, _, rest = key.partition(".")
        values = self._values(nodes.get(group, composed.config))
        value = values.get(rest if group in nodes else key, _ABSENT)
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
            ConfigError: the point cannot be composed.
        """
        composed, nodes = self._parts(*self._split(point))
        if composed.asks_hydra:
            return self._whole_recipe(point)
        values = self._loader.values_of(point)
        return self._fields.recipe(composed.config, nodes, values, lambda: self._whole_recipe(point))

    def _whole_recipe(self, point: Values) -> Recipe:
        """The recipe of a point, from a config that is not shared with other points."""
        with composition_errors(self._loader.overrides_of(point)):
            config, composed = self._config(point)
            choices = {**composed.choices, **dict(self._loader.choices_of(point))}
            with self._loader.answers_hydra(composed):
                return to_recipe(config, choices, self._loader.config_name)

    def _config(self, point: Values) -> tuple[DictConfig, Composed]:
        """A config for this point alone, and the composition from which it was made."""
        composed, nodes = self._parts(*self._split(point))
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

    def _values(self, config: DictConfig) -> Mapping[str, Any]:
        """Every value of a config by its dotted key, with interpolations unresolved."""
        if id(config) not in self._flat:
            values: Any = OmegaConf.to_container(config, resolve=False)
            self._flat[id(config)] = {key: value for key, value in flattened(values) if value != "???"}
        return self._flat[id(config)]

    def _parts(self, wide: Choices, own: Choices) -> tuple[Composed, Mapping[str, DictConfig]]:
        """A composed config, and the nodes that replace some of its groups."""
        family = self._families.get(_family_of(wide, own))
        if family is not None and family.template is not None:
            nodes = {group: family.nodes.get((group, option)) for group, option in own}
            present = {group: node for group, node in nodes.items() if node is not None}
            if len(present) == len(nodes):
                return family.template, present
        return self._combination(wide + own), {}

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

    def _compose_family(self, wide: Choices, groups: Mapping[str, Sequence[str]]) -> _Family:
        """Compose a first combination of options as the template, and the nodes of all other options.

        Options that fill their own groups do not affect each other, so that one composition gives a node of each group.
        """
        first = tuple((group, options[0]) for group, options in groups.items())
        try:
            template = self._combination(wide + first)
        except ConfigError as error:
            if find_key(error.key) is None:
                # No option has the key: the shared overrides are wrong, and no combination can be composed.
                self._combination(())
            # Another combination may be valid: compose each one separately.
            return _Family(None, {})
        family = _Family(template, {choice: template.config[choice[0]] for choice in first})
        outside = _outside(template, groups)
        for turn in range(1, max(map(len, groups.values()), default=1)):
            choices = tuple((group, options[turn % len(options)]) for group, options in groups.items())
            new = [choice for choice in choices if choice not in family.nodes]
            if not self._add(family, wide, choices, new, outside):
                for choice in new:
                    alone = tuple(choice if choice[0] == group else (group, option) for group, option in first)
                    self._add(family, wide, alone, [choice], outside)
        return family

    def _add(
        self, family: _Family, wide: Choices, choices: Choices, new: Iterable[tuple[str, str]], outside: str
    ) -> bool:
        """Compose a combination and keep its new nodes, if it differs from the template only in its groups."""
        try:
            composed = self._combination(wide + choices)
        except ConfigError:
            return False
        if _outside(composed, dict(choices)) != outside:
            return False
        family.nodes.update({choice: composed.config[choice[0]] for choice in new})
        return True


@dataclass(frozen=True)
class _Family:
    """The shared parts of points with the same wide options.

    Attributes:
        template: a composition of one option of each group; None if that composition failed.
    """

    template: Composed | None
    nodes: dict[tuple[str, str], DictConfig]


def _family_of(wide: Choices, own: Choices) -> tuple[Choices, frozenset[str]]:
    """The key of points that share one template: the same wide options, and options for the same groups."""
    return wide, frozenset(group for group, _ in own)


def _outside(composed: Composed, groups: Mapping[str, Any]) -> str:
    """A text of everything in a composition outside these groups."""
    config: Any = OmegaConf.to_container(composed.config, resolve=False)
    choices = {group: option for group, option in composed.choices.items() if group not in groups}
    return canonical_text([{key: value for key, value in config.items() if key not in groups}, choices])


_FIELDS = tuple(field.name for field in dataclasses.fields(Recipe))
# `${model.vocab_size}`; for other interpolations only the beginning matches, and the group is None.
_REFERENCE = re.compile(r"\$\{(?:(\w+)(?:\.\w+)*\})?")


class SharedFields:
    """Creates recipes from fields; configs that were passed to it must stay alive (`id` is their key) and unchanged."""

    def __init__(self) -> None:
        self._groups = discover()
        self._made: dict[tuple[Any, ...], Any] = {}
        self._failed: dict[tuple[Any, ...], ConfigError] = {}
        self._references: dict[tuple[str, int], frozenset[str] | None] = {}
        self._root = schema_node(Recipe)

    def recipe(
        self,
        config: DictConfig,
        nodes: Mapping[str, DictConfig],
        values: Sequence[tuple[str, Any]],
        whole: Callable[[], Recipe],
    ) -> Recipe:
        """The recipe of a point.

        Args:
            whole: composes the point without shared fields, if a field refers to others or its error must be explained.

        Raises:
            ConfigError: from `whole`; later points with the same wrong field get the same error without a composition.
        """
        keys = self._keys(config, nodes, values)
        if keys is None:
            return whole()
        for name, key in keys.items():
            if key in self._failed:
                raise self._failed[key]
            if key in self._made:
                continue
            own = [(path, value) for path, value in values if path.partition(".")[0] == name]
            try:
                if len(key) == 1:
                    self._made[key] = self._field(name, nodes.get(name), config, own)
                    continue
            # ValueError and OverflowError: a number has too many digits.
            except (ConfigError, OmegaConfBaseException, ValueError, OverflowError):
                pass
            # The field refers to other fields, or is wrong.
            try:
                recipe = whole()
            except ConfigError as error:
                if error.key.partition(".")[0] == name:
                    self._failed[key] = error
                raise
            for other, other_key in keys.items():
                self._made.setdefault(other_key, getattr(recipe, other))
        return Recipe(**{name: self._made[key] for name, key in keys.items()})

    def _keys(
        self, config: DictConfig, nodes: Mapping[str, DictConfig], values: Sequence[tuple[str, Any]]
    ) -> Mapping[str, tuple[Any, ...]] | None:
        """For each field, everything that determines its value; None if fields cannot be determined separately."""
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

    def _referred(self, name: str, source: DictConfig) -> frozenset[str] | None:
        """The other fields to which a field's values refer; None if an interpolation may refer to anything."""
        known = (name, id(source))
        if known not in self._references:
            plain: Any = OmegaConf.to_container(source, resolve=False)
            text = str(plain.get(name) if OmegaConf.get_type(source) is Recipe else plain)
            names = {match[1] for match in _REFERENCE.finditer(text)}
            self._references[known] = frozenset(names) if names <= set(_FIELDS) else None
        return self._references[known]
