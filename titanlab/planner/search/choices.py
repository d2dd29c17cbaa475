"""What a space varies beside degrees: the options of its groups, as they are discovered."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from titanlab.compile.schema import Compile
from titanlab.errors import ConfigError
from titanlab.options import discover
from titanlab.planner.search.space import Choice, Choices
from titanlab.recipe.recipe import Recipe
from titanlab.schedule.contract import PipelineSchedule

# Groups that vary only if a person asks for it.
VARIED = ("precision", "compile")


def choices_of(recipe: Recipe, *, vary: Sequence[str] = ()) -> Choices:
    """The choices for a resolved recipe: its own first.

    Args:
        vary: names of groups in `VARIED`; the others stay as the recipe has them.

    Raises:
        ConfigError: a name is not in `VARIED`.
    """
    for name in vary:
        if name not in VARIED:
            rule = "cannot be varied" if name else "names no group"
            raise ConfigError("--vary", name, rule, f"try {' or '.join(VARIED)}; all else varies anyway")
    compiles: list[Any] = [recipe.compile]
    if "compile" in vary:
        compiles += [Compile(), Compile(blocks=True, loss=True)]
    return Choices(
        schedules=_schedules(recipe.schedule),
        acs=_named(recipe.ac, _estimated(_defaults("ac"))),
        precisions=_named(recipe.precision, _defaults("precision") if "precision" in vary else []),
        compiles=[Choice(_compile_name(value), value) for value in _different(compiles)],
    )


def _defaults(group: str) -> list[Any]:
    """The default config of each kind that needs no value from a person."""
    configs = []
    for option in discover()[group].values():
        try:
            configs.append(option.schema())
        except ConfigError:
            continue
    return configs


def _schedules(own: PipelineSchedule) -> list[Choice]:
    """A recipe's own schedule, and those of every kind; names have the stages of a rank if they are several."""
    others = [other for schedule in _defaults("schedule") for other in schedule.alternatives()]
    choices = []
    for schedule in _different([own, *others]):
        stages = schedule.stage_count(ranks=1)
        choices.append(Choice(f"{schedule.kind} ×{stages}" if stages > 1 else schedule.kind, schedule))
    return choices


def _estimated(policies: Iterable[Any]) -> list[Any]:
    """Policies whose recomputation is known: not those for which a compiler chooses it."""
    return [policy for policy in policies if policy.compiler_budget() is None]


def _named(own: Any, others: Iterable[Any]) -> list[Choice]:
    return [Choice(_name(value), value) for value in _different([own, *others])]


def _different(values: Iterable[Any]) -> list[Any]:
    return list({repr(value): value for value in values}.values())


def _name(value: Any) -> str:
    """The kind, with the fields that differ from their defaults."""
    changed = []
    for field in dataclasses.fields(value):
        field_value = getattr(value, field.name)
        default = field.default_factory() if callable(field.default_factory) else field.default
        if field.name != "kind" and field_value != default and isinstance(field_value, int | float | bool):
            changed.append(f"{field.name}={str(field_value).lower() if isinstance(field_value, bool) else field_value}")
    return " ".join([value.kind, *changed])


def _compile_name(value: Compile) -> str:
    parts = [name for name, compiled in (("block", value.blocks), ("loss", value.loss)) if compiled]
    return "+".join(parts) or "off"
