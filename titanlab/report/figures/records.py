"""Rows of a sweep's table, from a data frame or as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from titanlab.report.figures.style import MOST_LINES, SERIES
from titanlab.sweep.comparison import groups

if TYPE_CHECKING:
    from pandas import DataFrame


def records_of(runs: DataFrame | Sequence[Mapping[str, Any]]) -> list[dict[Any, Any]]:
    """The rows of a table, with None for missing values.

    Args:
        runs: the frame of `sweep_frame`, or rows of `titanlab.sweep.rows`.
    """
    if isinstance(runs, Sequence):
        return [dict(row) for row in runs]
    plain = runs.astype(object)
    records: list[dict[Any, Any]] = plain.where(plain.notna(), None).to_dict("records")
    return records


def recipe_colours(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The colour of each run's recipe, the same in all figures of a sweep; empty if there are too many recipes."""
    # By name, so that the order of a figure's bars does not matter.
    ordered = sorted(groups(rows), key=lambda group: (group.world, group.label, group.is_control))
    if len(ordered) > MOST_LINES:
        return {}
    return {row["run"]: SERIES[place % len(SERIES)] for place, group in enumerate(ordered) for row in group.rows}
