"""Reads a sweep from a command line: the overrides that all points share, the space of the points, the control."""

from __future__ import annotations

import difflib
import itertools
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, RangeSweep
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from titanlab.errors import ConfigError
from titanlab.options import combining_groups
from titanlab.recipe import (
    Flags,
    Key,
    Loader,
    Recipe,
    SweepSpace,
    advice,
    as_typed,
    composition_errors,
    find_key,
    is_hydras_own,
    known_keys,
    override_text,
    own_start_error,
    plain_value,
    read_flags,
    schema_node,
    unknown_key,
    value_error,
)
from titanlab.sweep.space import LIMIT, WHERE, Expression, Values, canonical_text, expand, keys_of, read_expression
from titanlab.techniques.tracker.trackers_schema import choice_for_sweeps

CONTROL = "control"
_REPEATS = "repeats"
_TRACKER = "tracker"
_PROFILER = "profiler"
_BREAKDOWN = ("profiler=breakdown", "profiler.every=0")
_EXAMPLE = "try control: {}, the recipe without the sweep's changes, or control: {ac: none}"
# Keys with one value for the whole sweep.
_OF_THE_SWEEP = ("sweep", "runs", "sweeps", "notes")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a command line asks for: read and checked, but not composed yet.

    Attributes:
        loader: composes with the overrides that all points share.
        space: the definition of the points, as plain values.
        control: values of the control, a recipe run repeatedly to see drift of the machine; None: there is none.
        option: the chosen option of the group `sweeps`; None: the sweep is defined by the command line alone.
        named: whether the command line sets `name` for all runs.
        notices: lines for the user, such as why the sweep does not record with wandb.
    """

    loader: Loader
    points: Sequence[Values]
    space: Any
    where: Sequence[Expression]
    repeats: int
    control: Values | None
    option: str | None
    named: bool
    notices: tuple[str, ...] = ()

    @property
    def definition(self) -> Mapping[str, Any]:
        """The content of sweep.json that defines the sweep."""
        where = [expression.text for expression in self.where]
        # Omit the key without a control: definitions of older sweeps, which had no controls, then stay equal.
        control = {} if self.control is None else {CONTROL: dict(self.control)}
        overrides = list(self.loader.overrides)
        return {"overrides": overrides, "space": self.space, "where": where, "repeats": self.repeats, **control}


def read_request(arguments: Sequence[str], loader: Loader | None = None, *, measured: bool = False) -> Request:
    """Read the arguments of a verb that takes many recipes, and the sweep's file if they name one.

    Args:
        measured: see `plan_study`.
        loader: has composed these arguments, which describe one recipe; None: nothing is composed yet.

    Raises:
        ConfigError: the arguments do not describe a sweep.
    """
    flags = read_flags(arguments)
    with composition_errors(flags.overrides, flags.values):
        parsed = OverridesParser.create().parse_overrides(list(map(as_typed, flags.overrides)))
    shared = [text for text, override in zip(flags.overrides, parsed, strict=True) if not override.is_sweep_override()]
    # A caller that passes a loader starts a single run.
    is_sweep, loader = loader is None, loader or Loader(flags, shared)
    base = loader.base()
    _check_plugins(base)
    node = base.hydra.sweeper
    # Without a space, the node of the sweeper is Hydra's own, which lacks these keys.
    settings: Any = {"space": None, "where": None, "repeats": 1, "control": None}
    if has_space := OmegaConf.get_type(node) is SweepSpace:
        settings = OmegaConf.to_container(node, resolve=False)
    space, repeats = settings["space"], settings["repeats"]
    if typed := _typed_values(loader, flags, {} if has_space else node.get("params") or {}):
        for key in () if space is None else keys_of(expand(space)):
            if key in typed:
                rule = "is swept by the sweep's file too"
                raise ConfigError(key, _listed(typed[key]), rule, "leave it out here, or there")
        # The product of the file's space and the values that the user has typed.
        space = {"product": dict(typed)} if space is None else {"product": [space, {"product": dict(typed)}]}
    points = [{}] if space is None else expand(space)
    if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
        raise ConfigError(_REPEATS, repeats, "must be a whole number, at least 1", f"try {_REPEATS}: 1")
    if repeats > 1000:
        raise ConfigError(_REPEATS, repeats, "is more than 1000", f"try {_REPEATS}: 3")
    if len(points) * repeats > LIMIT:
        rule = f"of {len(points)} points each are more runs than {LIMIT}"
        raise ConfigError(_REPEATS, repeats, rule, "take some values out, or repeat less often")
    control, swept = read_control(settings["control"]), keys_of(points)
    request = Request(
        loader=loader,
        points=points,
        space=space,
        where=_where(settings["where"]),
        repeats=repeats,
        control=control,
        option=base.hydra.runtime.choices.get("sweeps"),
        named=any(override.key_or_group == "name" for override in parsed),
    )
    # A key with one value for all points must not have other values in the space or in the control.
    for override in parsed:
        key, value = override.key_or_group, override.value()
        if not override.is_sweep_override() and control and key in control:
            rule = f"is one value for all runs, and the sweep's control has another ({control[key]})"
            raise ConfigError(key, value, rule, f"leave it out, or give hydra.sweeper.{CONTROL}")
        if not override.is_sweep_override() and key in swept:
            rule = "is one value for all points, and the sweep's file gives it several"
            cure = f'leave it out, or keep some points: hydra.sweeper.where=["{key} == {value!r}"]'
            raise ConfigError(key, value, rule, cure)
    _check_keys(request)
    if not is_sweep:
        return request
    return replace(request, notices=choose_defaults(loader, [*points, control or {}], measured=measured))


def choose_defaults(loader: Loader, points: Sequence[Values], *, measured: bool) -> tuple[str, ...]:
    """Give the loader a sweep's default options, unless others are chosen. Returns lines that the user must know."""
    chosen = loader.chosen(points)
    notices: tuple[str, ...] = ()
    if _TRACKER not in chosen:
        option, notices = choice_for_sweeps(os.environ)
        loader.defaults += (f"{_TRACKER}={option}",)
    if measured and _PROFILER not in chosen:
        loader.defaults += _BREAKDOWN
    return notices


def _check_plugins(base: DictConfig) -> None:
    """Check that Hydra's sweeper and launcher are not replaced: titanlab plans and submits all points together."""
    for name in ("sweeper", "launcher"):
        node = base.hydra[name]
        if node is None:
            rule = "removes a part of Hydra that titanlab needs for sweeps"
            raise ConfigError(f"hydra.{name}", None, rule, "leave it out")
        target = "" if OmegaConf.get_type(node) is SweepSpace else str(node.get("_target_"))
        if target and not is_hydras_own(target):
            key, value = f"hydra/{name}", base.hydra.runtime.choices.get(f"hydra/{name}")
            if value in ("basic", "space"):
                key, value = f"hydra.{name}._target_", target
            raise own_start_error(key, value)


def _typed_values(loader: Loader, flags: Flags, params: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The swept values of the command line and of Hydra's own `hydra.sweeper.params`, by key."""
    texts = [*(f"{key}={value}" for key, value in params.items()), *flags.overrides]
    values: dict[str, list[Any]] = {}
    for text, override in zip(texts, loader.parse(texts), strict=True):
        key = override.get_key_element().lstrip("+")
        if override.is_sweep_override():
            if key in values:
                raise ConfigError(key, text.partition("=")[2], "is swept twice", f"give all values once: {key}=a,b")
            values[key] = _swept_values(loader, text, override)
        elif text not in flags.overrides:
            raise ConfigError("hydra.sweeper.params", text, "is one value", "give it as an override")
    return values


def _swept_values(loader: Loader, text: str, override: Override) -> list[Any]:
    key, _, typed = text.partition("=")
    if not override.is_discrete_sweep():
        cure = f"list some: {key}=0.1,0.2, or range(start,stop,step)"
        raise ConfigError(key, typed, "has infinitely many values", cure)
    try:
        # Create at most one value more than the limit, also of a range that is shuffled: a range may have billions.
        swept: Any = override.value()
        is_range = isinstance(swept, RangeSweep)
        known = swept.range() if is_range else override.sweep_iterator()
        values = list(map(plain_value, itertools.islice(known, LIMIT + 1)))
        if is_range and swept.shuffle:
            random.shuffle(values)
    except (HydraException, ArithmeticError, ValueError) as error:
        # A step of 0, or a bound that is not a number, raises no HydraException but another error.
        rule = (
            str(error).splitlines()[0] if isinstance(error, HydraException) else "has infinitely many values, or none"
        )
        raise ConfigError(key, typed, rule, f"list the values: {key}=a,b") from error
    if len(values) > LIMIT:
        raise ConfigError(key, typed, f"has more than {LIMIT} values", "take some out")
    if loader.is_group(override.key_or_group):
        values = [value for value in values if not str(value).endswith("schema")]
    if not values:
        raise ConfigError(key, typed, "fits no value", f"list the values: {key}=a,b")
    return values


def _where(where: Any) -> list[Expression]:
    if where is None:
        return []
    if isinstance(where, str):
        where = [where]
    if not isinstance(where, list):
        raise ConfigError(WHERE, where, "must be a list of conditions", "write where: ['world <= 8']")
    expressions = [read_expression(text) for text in where]
    names = {key.name for key in known_keys()} | {"sweeps", "recipe"}
    for expression in expressions:
        for name in expression.names:
            if name not in names:
                rule = f"asks for {name}, which is not a key of a recipe"
                raise ConfigError(WHERE, expression.text, rule, advice(name))
    return expressions


def read_control(value: Any) -> Values | None:
    """The control's values by key: a mapping in the sweep's file, or `true` for an empty one; null, `false`: none."""
    if value is None or value is False:
        return None
    if value is True:
        return {}
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ConfigError(CONTROL, value, "must be one mapping of keys to values", _EXAMPLE)
    for key, setting in value.items():
        if isinstance(setting, dict):
            raise ConfigError(CONTROL, f"{key}: {setting}", "takes keys with dots", f"write {key}.KEY: VALUE")
        if key in ("name", "repeat"):
            raise ConfigError(CONTROL, f"{key}: {setting}", "is given by the control itself", "leave it out")
    return dict(value)


def _check_keys(request: Request) -> None:
    """Check that a space sets only keys of recipes, and to values of their types."""
    loader = request.loader
    by_name: dict[str, list[Key]] = {}
    for known in known_keys():
        by_name.setdefault(known.name, []).append(known)
    values: dict[str, dict[str, Any]] = {}
    for point in (*request.points, request.control or {}):
        for key, value in point.items():
            values.setdefault(key, {})[canonical_text(value)] = value
    for key, by_text in values.items():
        choices = list(by_text.values())
        if key.partition(".")[0].partition("/")[0] == "hydra":
            raise ConfigError(key, _listed(choices), "is Hydra's own, with one value for all points", "give one value")
        if key in _OF_THE_SWEEP:
            rule = "must have one value for the whole sweep"
            raise ConfigError(key, _listed(choices), rule, "give one value, outside the space")
        if key == "repeat" and request.repeats > 1:
            raise ConfigError(key, _listed(choices), "is counted by repeats already", "leave one of the two out")
        if loader.is_group(key):
            options = loader.options(key.partition("@")[0])
            several = key in combining_groups()
            for choice in choices:
                for option in choice if several and isinstance(choice, list) else [choice]:
                    if not isinstance(option, str) or option not in options:
                        near = difflib.get_close_matches(str(option), options, n=1)
                        cure = f"try {near[0]}; " if near else ""
                        cure += f"known: {', '.join(options)}"
                        raise ConfigError(key, option, "is not an option of this group", cure)
            continue
        keys = by_name.get(key) or [known for known in [find_key(key)] if known is not None]
        if not keys:
            raise unknown_key(key, _listed(choices))
        _check_types(keys, key, choices)


def _check_types(known: Sequence[Key], key: str, values: Sequence[Any]) -> None:
    """Check that values have the type of their key, in at least one of the options that have the key."""
    # Create the nodes once: this takes longer than checking a thousand values.
    nodes = [
        (
            schema_node(Recipe if schema.option is None else schema.option.schema),
            # Do not use the given key: if several options are chosen, it contains the option's name.
            schema.name if schema.option is None else schema.name.removeprefix(f"{schema.option.group}."),
        )
        for schema in known
    ]
    for value in values:
        for place, (node, rest) in enumerate(nodes, 1):
            try:
                OmegaConf.update(node, rest, value, merge=True)
                break
            except OmegaConfBaseException as error:
                if place == len(nodes):
                    failure = value_error(error, [override_text(key, value)])
                    raise ConfigError(key, value, failure.rule, failure.cure) from error


def _listed(values: Sequence[Any]) -> str:
    return ",".join(map(str, values))
