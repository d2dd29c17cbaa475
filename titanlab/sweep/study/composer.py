"""Recipes of many points: Hydra composes each option once, and what it composed is put together for every point.

Asking Hydra takes about a twentieth of a second, too long to do for each of a thousand points. Almost all of them
differ in values, and in options that fill a group of their own; such an option is composed once. Whatever may reach
further (a recipe, a `@package`, an option that brings others) is composed by Hydra for every combination that there
is. What comes out is what Hydra itself would compose; a test compares the two.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from titanlab.errors import ConfigError
from titanlab.recipe.composition.errors import composition_errors
from titanlab.recipe.composition.keys import find_key
from titanlab.recipe.composition.loader import Composed, Loader
from titanlab.recipe.composition.recipes import to_recipe
from titanlab.recipe.recipe import Recipe
from titanlab.sweep.study.shared_fields import SharedFields
from titanlab.sweep.study.space import Values, same

Choices = tuple[tuple[str, str], ...]
_ABSENT = object()


class Composer:
    """Composes the points of one sweep.

    Args:
        loader: Hydra, with the overrides that all points share.
        points: all that will be asked for; what they have in common is composed first.
    """

    def __init__(self, loader: Loader, points: Sequence[Values]) -> None:
        self._loader = loader
        self._families: dict[tuple[Choices, frozenset[str]], _Family] = {}
        self._whole: dict[Choices, Composed | ConfigError] = {}
        self._flat: dict[int, dict[str, Any]] = {}
        self._fields = SharedFields()
        self._numbers = {same(point): number for number, point in enumerate(points)}
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
        choices = self._choices(wide, own)
        if key in choices:
            return choices[key]
        found = self._composed_value(wide, own, key)
        # A mapping sets what is below it; an option is in what was composed.
        beside = (each for each in point if each.startswith(f"{key}.") or key.startswith(f"{each}."))
        changed = any(not self._loader.is_group(each) for each in beside)
        if changed or (isinstance(found, str) and "${" in found):
            config, composed = self._config(point)
            with self._loader.answers_hydra(composed):
                found = OmegaConf.select(config, key, default=_ABSENT)
        if found is _ABSENT:
            raise KeyError(key)
        return found

    def recipe(self, point: Values) -> Recipe:
        """The recipe of a point.

        Raises:
            ConfigError: there is none.
        """
        composed, nodes = self._parts(*self._split(point))
        values = self._loader.values_of(point)
        keys = None if composed.asks_hydra else self._fields.keys(composed.config, nodes, values)
        recipe = None if keys is None else self._fields.recipe(keys, composed.config, nodes, values)
        if recipe is None:
            recipe = self._whole_recipe(point)
            if keys is not None:
                self._fields.keep(keys, recipe)
        return recipe

    def _whole_recipe(self, point: Values) -> Recipe:
        """The recipe of a config that is the point's own."""
        with composition_errors(self._loader.overrides_of(point)):
            config, composed = self._config(point)
            choices = {**composed.choices, **dict(self._loader.choices_of(point))}
            with self._loader.answers_hydra(composed):
                return to_recipe(config, choices, self._loader.config_name)

    def _config(self, point: Values) -> tuple[DictConfig, Composed]:
        """A config of a point's own, and what it was made of."""
        composed, nodes = self._parts(*self._split(point))
        if composed.asks_hydra:
            # `${hydra:…}` may ask for anything, the point's own overrides too.
            composed = self._loader.compose(self._loader.overrides_of(point))
            composed.whole.hydra.job.num = self._numbers.get(same(point), 0)
            return composed.config, composed
        config = copy.deepcopy(composed.config)
        for group, node in nodes.items():
            config[group] = node
        with composition_errors(self._loader.overrides_of(point)):
            for key, value in self._loader.values_of(point):
                OmegaConf.update(config, key, value, merge=True)
        return config, composed

    def _split(self, point: Values) -> tuple[Choices, Choices]:
        """A point's options: those that may reach beyond their group, and the others."""
        choices = self._loader.choices_of(point)
        wide = tuple(each for each in choices if not self._loader.is_own(*each))
        return wide, tuple(each for each in choices if each not in wide)

    def _choices(self, wide: Choices, own: Choices) -> Mapping[str, Any]:
        composed, _ = self._parts(wide, own)
        return {**composed.choices, **dict(own)}

    def _composed_value(self, wide: Choices, own: Choices, key: str) -> Any:
        """What was composed, before the point's own values."""
        composed, nodes = self._parts(wide, own)
        group, _, rest = key.partition(".")
        if group in nodes:
            return self._values(nodes[group]).get(rest, _ABSENT)
        return self._values(composed.config).get(key, _ABSENT)

    def _values(self, config: DictConfig) -> Mapping[str, Any]:
        """Every value of a config by its dotted key, as it was written."""
        if id(config) not in self._flat:
            self._flat[id(config)] = dict(_flattened(OmegaConf.to_container(config, resolve=False), ""))
        return self._flat[id(config)]

    def _parts(self, wide: Choices, own: Choices) -> tuple[Composed, Mapping[str, DictConfig]]:
        """A composed config, and nodes to put in place of some of its groups."""
        family = self._families.get(_family_of(wide, own))
        if family is not None and family.template is not None:
            nodes = {group: family.nodes.get((group, option)) for group, option in own}
            present = {group: node for group, node in nodes.items() if node is not None}
            if len(present) == len(nodes):
                return family.template, present
        return self._combination(wide + own), {}

    def _combination(self, choices: Choices) -> Composed:
        """Hydra's own word for a combination of options."""
        if choices not in self._whole:
            try:
                self._whole[choices] = self._loader.compose(self._loader.overrides_of(dict(choices)))
            except ConfigError as error:
                self._whole[choices] = error
        found = self._whole[choices]
        if isinstance(found, ConfigError):
            raise found
        return found

    def _compose_family(self, wide: Choices, groups: Mapping[str, Sequence[str]]) -> _Family:
        """A first combination of options, and the node of every other one.

        Options that fill their own groups do not see each other, so that one composition shows one of each group.
        """
        first = tuple((group, options[0]) for group, options in groups.items())
        try:
            template = self._combination(wide + first)
        except ConfigError as error:
            self._check_shared(error)
            # Some combination may do; each is composed for itself.
            return _Family(None, {})
        family = _Family(template, {each: template.config[each[0]] for each in first})
        outside = _outside(template, groups)
        for turn in range(1, max(map(len, groups.values()), default=1)):
            shown = tuple((group, options[turn % len(options)]) for group, options in groups.items())
            new = [each for each in shown if each not in family.nodes]
            if not self._add(family, wide, shown, new, outside):
                for each in new:
                    alone = tuple(each if each[0] == group else (group, option) for group, option in first)
                    self._add(family, wide, alone, [each], outside)
        return family

    def _check_shared(self, error: ConfigError) -> None:
        """Check that what all points share has keys that some option has: else no combination can be composed."""
        if find_key(error.key) is None:
            self._combination(())

    def _add(
        self, family: _Family, wide: Choices, shown: Choices, new: Iterable[tuple[str, str]], outside: str
    ) -> bool:
        """Compose a combination and keep nodes of it, if nothing but its groups differs from the first one."""
        try:
            composed = self._combination(wide + shown)
        except ConfigError:
            return False
        if _outside(composed, dict(shown)) != outside:
            return False
        family.nodes.update({each: composed.config[each[0]] for each in new})
        return True


@dataclass(frozen=True)
class _Family:
    """What points share that have the same far-reaching options.

    Attributes:
        template: a composition of one option of each group; None where the first one failed.
        nodes: what the options put into their groups.
    """

    template: Composed | None
    nodes: dict[tuple[str, str], DictConfig]


def _family_of(wide: Choices, own: Choices) -> tuple[Choices, frozenset[str]]:
    """What points have in common that one composition does for: a point that leaves a group alone has the sweep's."""
    return wide, frozenset(group for group, _ in own)


def _outside(composed: Composed, groups: Mapping[str, Any]) -> str:
    """All of a composition but these groups, as a text."""
    config: Any = OmegaConf.to_container(composed.config, resolve=False)
    choices = {group: option for group, option in composed.choices.items() if group not in groups}
    return same([{key: value for key, value in config.items() if key not in groups}, choices])


def _flattened(values: Any, prefix: str) -> Iterable[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flattened(value, f"{prefix}{key}.")
        elif value != "???":
            yield prefix + str(key), value
