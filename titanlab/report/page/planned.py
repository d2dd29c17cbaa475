"""What planner and schedules say of the recipes that a report shows: parts of a step, and timelines of pipelines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from titanlab.errors import TitanlabError
from titanlab.plan.explanation import timeline_of
from titanlab.plan.machine import machine_of
from titanlab.plan.step_time import step_time
from titanlab.recipe.recipe import Recipe, from_mapping
from titanlab.report.figures.split import Split
from titanlab.report.figures.timelines import Pipeline
from titanlab.report.page.facts import Facts
from titanlab.schedule.timeline import simulate
from titanlab.sweep.comparison import Group
from titanlab.system.text import counted

_BREAKDOWN = "breakdown/"
# Cells of all timelines of a report; a larger one would have megabytes.
MOST_CELLS = 3000


def measured_splits(facts: Facts) -> list[Split]:
    """The parts of a step of the runs with `profiler=breakdown`: of their latest window."""
    splits = []
    for group, _ in facts.shown:
        row, windows = _windows(facts, group)
        if not windows:
            continue
        seconds: dict[str, float] = {}
        columns = []
        for name, value in windows[-1].items():
            part = name.removeprefix(_BREAKDOWN).removesuffix("(s)")
            if not name.startswith(_BREAKDOWN) or part == "step" or not isinstance(value, int | float) or value <= 0:
                continue
            columns.append(name)
            seconds[part.removeprefix("exposed_")] = float(value)
        if seconds:
            splits.append(Split(run=str(row["run"]), label=group.label, seconds=seconds, columns=columns))
    return splits


def _windows(facts: Facts, group: Group) -> tuple[Mapping[str, Any], list[dict[str, Any]]]:
    """The first run of a recipe that has measured parts of a step, and its windows; without one, no windows."""
    for row in group.rows:
        windows = facts.metrics(row, "breakdown") if row["step"] else []
        if windows:
            return row, windows
    return group.rows[0], []


def estimated_splits(facts: Facts) -> list[Split]:
    """The planner's parts of a step, of the recipes for whose machine it has figures."""
    splits = []
    for group, row in facts.shown:
        recipe = _recipe(facts, row)
        if recipe is None:
            continue
        try:
            parts = step_time(recipe, machine_of(recipe)).parts
        except (TitanlabError, ArithmeticError, ValueError, LookupError):
            continue
        splits.append(
            Split(
                run=str(row["run"]), label=group.label, seconds=dict(parts), columns=["config.yaml"], is_measured=False
            )
        )
    return splits


def pipelines(facts: Facts) -> tuple[list[Pipeline], list[str]]:
    """Timelines of the recipes with a pipeline, one for each schedule; and why others have none."""
    timelines: list[Pipeline] = []
    left_out: list[str] = []
    seen = set[tuple[Any, ...]]()
    cells = 0
    for group, row in facts.shown:
        if (row["layout.pipeline"] or 1) == 1:
            continue
        # Other recipes with the same pipeline have a timeline of the same form.
        key = tuple(
            row[name] for name in ("schedule", "layout.pipeline", "layout.label", "microbatch", "global_batch", "model")
        )
        if key in seen:
            continue
        seen.add(key)
        recipe = _recipe(facts, row)
        if recipe is None:
            left_out.append(f"{group.label}: its config.yaml cannot be read")
            continue
        try:
            count = sum(
                map(len, recipe.schedule.actions(ranks=recipe.layout.pipeline, microbatches=recipe.microbatches))
            )
            if cells + count > MOST_CELLS:
                left_out.append(f"{group.label}: {count:,} actions are too many for a page")
                continue
            timelines.append(_pipeline(recipe, group, str(row["run"])))
            cells += count
        except (TitanlabError, ArithmeticError, ValueError, LookupError) as error:
            left_out.append(f"{group.label}: {error}")
    return timelines, left_out


def _pipeline(recipe: Recipe, group: Group, run: str) -> Pipeline:
    """The timeline with the planner's times; where it has none, with a backward pass of two forward passes."""
    label = f"{group.label} · {recipe.schedule.kind}, {counted(recipe.microbatches, 'microbatch', 'microbatches')}"
    try:
        timeline = timeline_of(recipe, machine_of(recipe))
        if timeline is not None:
            return Pipeline(run=run, label=label, timeline=timeline, unit="s, estimated")
    except TitanlabError:
        pass
    ranks = recipe.layout.pipeline
    orders = recipe.schedule.actions(ranks=ranks, microbatches=recipe.microbatches)
    return Pipeline(run=run, label=label, timeline=simulate(orders, recipe.schedule.placement(ranks=ranks)))


def _recipe(facts: Facts, row: Mapping[str, Any]) -> Recipe | None:
    config = facts.config(row)
    if config is None:
        return None
    try:
        return from_mapping(config)
    except (TitanlabError, AssertionError, TypeError, ValueError, LookupError):
        return None
