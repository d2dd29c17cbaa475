"""The planner's estimates against what was measured: time of a step, and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from titanlab.report.figures.records import records_of
from titanlab.report.figures.style import (
    BLUE,
    GRID,
    INK,
    MUTED,
    OVERSUBSCRIBED_TEXT,
    PALE,
    WIDTH,
    empty_figure,
    set_axis,
    set_title,
    show_text,
)
from titanlab.system.text import significant

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame

    from titanlab.report.figures.traced import TracedFigure

# Column of the measurement, column of the estimate, title, unit.
PAIRS = (
    ("step_seconds", "estimate.step_seconds", "time of a step", "s"),
    ("memory_gib", "estimate.memory_gib", "memory", "GiB"),
)
_BAND = 0.2
_SPREAD = 8.0  # largest over smallest value from which axes are logarithmic


def estimate_against_measurement(runs: DataFrame | Sequence[Mapping[str, Any]]) -> TracedFigure:
    """A point for each run that is done: on the line the estimate is right, between the dashed lines within 20 %.

    Args:
        runs: the frame of `sweep_frame`, or the rows of a table.
    """
    rows = records_of(runs)
    figure = empty_figure(WIDTH, 3.9)
    for axis, (measured, estimated, title, unit) in zip(figure.subplots(1, 2), PAIRS, strict=True):
        set_axis(axis)
        _draw(figure, axis, compared(rows, measured, estimated), (measured, estimated), unit)
        axis.set_xlabel(f"estimate ({unit})")
        axis.set_ylabel(f"measured ({unit})")
        set_title(axis, title)
    if any(row["oversubscribed"] for row, _, _ in compared(rows, *PAIRS[0][:2])):
        from matplotlib.lines import Line2D

        handle = Line2D([], [], linestyle="none", marker="o", color=PALE, markeredgecolor=BLUE)
        figure.legend(
            [handle], [OVERSUBSCRIBED_TEXT], loc="outside lower left", fontsize=8.5, frameon=False, labelcolor=INK
        )
    return figure


def compared(
    rows: Sequence[Mapping[str, Any]], measured: str, estimated: str
) -> list[tuple[Mapping[str, Any], float, float]]:
    """Runs that are done and have both values: row, measurement, estimate."""
    return [
        (row, row[measured], row[estimated])
        for row in rows
        if row["outcome"] == "done" and (row.get(measured) or 0) > 0 and (row.get(estimated) or 0) > 0
    ]


def _draw(
    figure: TracedFigure,
    axis: Axes,
    points: Sequence[tuple[Mapping[str, Any], float, float]],
    columns: tuple[str, str],
    unit: str,
) -> None:
    if not points:
        show_text(axis, "no run has both")
        axis.set_xticks([])
        axis.set_yticks([])
        return
    values = [value for _, *pair in points for value in pair]
    least, most = min(values), max(values)
    is_wide = most > _SPREAD * least
    low, high = (least / 1.5, most * 1.5) if is_wide else (0.0, most * 1.12)
    if is_wide:
        axis.set_xscale("log")
        axis.set_yscale("log")
    for share, style in ((1.0, "solid"), (1 + _BAND, (0, (3, 2))), (1 - _BAND, (0, (3, 2)))):
        axis.plot([low, high], [share * low, share * high], color=MUTED, linewidth=0.9, linestyle=style, zorder=1)
    for row, measured, estimated in points:
        hollow = bool(row["oversubscribed"]) and columns[0] == "step_seconds"
        (point,) = axis.plot(
            estimated,
            measured,
            "o",
            markersize=5.5,
            color=PALE if hollow else BLUE,
            markeredgecolor=BLUE if hollow else INK,
            markeredgewidth=0.7,
        )
        excess = 100 * (estimated / measured - 1)
        description = (
            f"measured {significant(measured)} {unit}, estimate {significant(estimated)} {unit} ({excess:+.0f} %)"
        )
        figure.trace(point, runs=[row["run"]], columns=columns, text=f"{row['run']}: {description}")
    axis.set_xlim(low, high)
    axis.set_ylim(low, high)
    axis.grid(color=GRID, linewidth=0.6)
    axis.set_axisbelow(True)
