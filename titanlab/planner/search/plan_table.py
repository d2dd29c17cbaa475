"""A plan as lines of text and as plain values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from titanlab.planner.search.plan import MARGIN, Plan
from titanlab.planner.search.ranking import Ranked
from titanlab.planner.step_time import StepTime
from titanlab.recipe.recipe import Recipe
from titanlab.terminal.numerals import counted, grouped, significant

HEADINGS = (
    "", "layout", "schedule", "mb", "AC", "precision", "compile", "GB", "reserved", "tok/s/GPU", "MFU", "step", "of it"
)  # fmt: skip
FIGURES = ("", "mb", "GB", "reserved", "tok/s/GPU", "MFU", "step")
_RULES = 6
_PARTS = 3
# Differences below this share of a step are not worth a word.
_SMALL = 0.002


def table_rows(plan: Plan) -> list[tuple[str, ...]]:
    """The cells of a plan under `HEADINGS`; columns whose cells are all empty may be left out."""
    varied = [_differs(plan, name) for name in ("precision", "compile")]
    return [
        (
            str(place),
            ranked.recipe.layout.label,
            ranked.point.schedule.name,
            str(ranked.point.microbatch),
            ranked.point.ac.name,
            ranked.point.precision.name if varied[0] else "",
            ranked.point.compile.name if varied[1] else "",
            f"{ranked.memory.allocated / 1e9:.1f}",
            f"{ranked.reserved / 1e9:.1f}",
            grouped(ranked.time.tokens_per_second),
            "" if math.isnan(ranked.time.mfu) else f"{100 * ranked.time.mfu:.1f}%",
            f"{significant(ranked.time.seconds, 4)} s",
            split_text(ranked.time),
        )
        for place, ranked in enumerate(plan.best, start=1)
    ]


def title(plan: Plan) -> str:
    """What was planned."""
    base, machine = plan.base, plan.machine
    limit = "memory not known" if math.isinf(plan.limit) else (
        f"{machine.memory_bytes / 1e9:.0f} GB each, {100 * MARGIN:.0f} % of it left free"
    )  # fmt: skip
    return (
        f"{base.model.account().parameter_count / 1e9:.2f}B parameters on {counted(base.layout.world, machine.name)} "
        f"({limit}); "
        f"{counted(base.training.global_batch, 'sequence')} of {grouped(base.training.seq_len)} tokens a step"
    )


def split_text(time: StepTime) -> str:
    """The largest parts of a step: `compute 84%, bubble 9%, tensor 4%`."""
    parts = sorted(time.parts.items(), key=lambda part: -part[1])[:_PARTS]
    return ", ".join(f"{name} {100 * seconds / time.seconds:.0f}%" for name, seconds in parts if seconds > 0)


def left_out(plan: Plan) -> list[str]:
    """How many layouts rules forbid, and how many recipes do not fit."""
    lines = [f"{plan.listed:,} recipes; {plan.too_large:,} of those looked at do not fit"]
    if plan.dropped:
        lines.append("layouts that no recipe can have, by rule:")
        lines += [f"  {line}" for line in summary(plan.dropped, _RULES)]
    if plan.refused:
        lines.append("fast recipes that a rule forbids:")
        lines += [f"  {line}" for line in summary(plan.refused, _RULES)]
    return lines


def reasons(best: Sequence[Ranked]) -> list[str]:
    """One sentence for each recipe: which terms make it slower than the one above it."""
    lines = []
    for place, ranked in enumerate(best):
        if place == 0:
            lines.append(f"1 is the fastest that fits: {split_text(ranked.time)}")
        else:
            lines.append(f"{place + 1} {_difference(best[place - 1], ranked)}")
    return lines


def _difference(above: Ranked, ranked: Ranked) -> str:
    change = ranked.time.seconds - above.time.seconds
    small = _SMALL * above.time.seconds
    names = dict.fromkeys((*above.time.parts, *ranked.time.parts))
    parts = {name: ranked.time.parts.get(name, 0.0) - above.time.parts.get(name, 0.0) for name in names}
    named = sorted((part for part in parts.items() if abs(part[1]) > small), key=lambda part: -abs(part[1]))[:_PARTS]
    terms = ", ".join(f"{name} {seconds:+.3g} s" for name, seconds in named)
    freed = above.reserved - ranked.reserved
    memory = f"; it takes {abs(freed) / 1e9:.1f} GB {'less' if freed > 0 else 'more'}" if abs(freed) > 0.5e9 else ""
    if not terms:
        return f"takes as long within {100 * _SMALL:.1f} %{memory}"
    return f"is {change:.3g} s slower: {terms}{memory}"


def _differs(plan: Plan, name: str) -> bool:
    return len({getattr(ranked.point, name).name for ranked in plan.best}) > 1


def plan_values(plan: Plan) -> dict[str, Any]:
    """The same content as plain values; bytes and seconds."""
    return {
        "world": plan.base.layout.world,
        "device": plan.machine.name,
        "memory_bytes": plan.machine.memory_bytes,
        "limit_bytes": plan.limit,
        "global_batch": plan.base.training.global_batch,
        "seq_len": plan.base.training.seq_len,
        "recipes": plan.listed,
        "too_large": plan.too_large,
        "dropped_layouts": dict(plan.dropped),
        "refused": dict(plan.refused),
        "advice": list(plan.advice),
        "best": [_values(ranked, plan.base) for ranked in plan.best],
    }


def _values(ranked: Ranked, base: Recipe) -> dict[str, Any]:
    return {
        "layout": ranked.recipe.layout.label,
        "degrees": ranked.recipe.layout.degrees(),
        "schedule": ranked.point.schedule.name,
        "microbatch": ranked.point.microbatch,
        "microbatches": ranked.recipe.microbatches,
        "ac": ranked.point.ac.name,
        "precision": ranked.point.precision.name,
        "compile": ranked.point.compile.name,
        "overrides": overrides(ranked, base),
        "allocated_bytes": ranked.memory.allocated,
        "reserved_bytes": ranked.reserved,
        "memory": dict(ranked.memory.items),
        "step_seconds": ranked.time.seconds,
        "parts": dict(ranked.time.parts),
        "tokens_per_second_per_device": ranked.time.tokens_per_second,
        "mfu": ranked.time.mfu,
    }


def overrides(ranked: Ranked, base: Recipe) -> list[str]:
    """The arguments that make the recipe of the request this one; precision and compile only if they differ.

    Args:
        base: the recipe of the request.
    """
    degrees = [f"parallelism.{axis}={degree}" for axis, degree in ranked.recipe.layout.degrees().items()]
    if ranked.recipe.model.account().experts is not None:
        degrees.append(f"parallelism.expert={ranked.recipe.layout.expert}")
    arguments = [*degrees, f"training.microbatch={ranked.point.microbatch}", *_chosen("ac", ranked.point.ac.value)]
    if ranked.recipe.layout.pipeline > 1:
        arguments += _chosen("schedule", ranked.point.schedule.value)
    if ranked.recipe.precision != base.precision:
        arguments += _chosen("precision", ranked.recipe.precision)
    if ranked.recipe.compile != base.compile:
        arguments += _fields("compile", ranked.recipe.compile, bool | str)
    return arguments


def _chosen(group: str, option: Any) -> list[str]:
    """An option with its numbers, also those that are defaults: the recipe of the request may have others."""
    return [f"{group}={option.kind}", *_fields(group, option, int | float)]


def _fields(group: str, option: Any, types: Any) -> list[str]:
    """The fields of these types, as arguments."""
    values = {field.name: getattr(option, field.name) for field in dataclasses.fields(option)}
    return [f"{group}.{name}={str(value).lower()}" for name, value in values.items() if isinstance(value, types)]


def summary(dropped: Mapping[str, int], limit: int) -> list[str]:
    """The rules with the most layouts, one line each."""
    rows = sorted(dropped.items(), key=lambda row: -row[1])
    lines = [f"{count:,}: {rule}" for rule, count in rows[:limit]]
    if len(rows) > limit:
        lines.append(f"{sum(count for _, count in rows[limit:]):,}: {len(rows) - limit} other rules")
    return lines
