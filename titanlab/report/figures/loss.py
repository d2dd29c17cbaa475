"""Training loss against tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from titanlab.costs import meter
from titanlab.report.figures.records import records_of
from titanlab.report.figures.style import (
    GRID,
    INK,
    LINE_STYLES,
    MOST_LINES,
    SERIES,
    WIDTH,
    legend_text,
    new_figure,
    set_title,
    show_text,
)
from titanlab.system.text import short, significant

if TYPE_CHECKING:
    from pandas import DataFrame

    from titanlab.report.figures.traced import TracedFigure

# More cannot be told from each other in a figure of 8 inches.
_MOST_POINTS = 400


def loss_by_tokens(
    steps: DataFrame | Sequence[Mapping[str, Any]],
    *,
    labels: Mapping[str, str] | None = None,
    colours: Mapping[str, str] | None = None,
) -> TracedFigure:
    """Training loss against tokens, one line for each run; lines that cover each other have different widths.

    Args:
        steps: the frame of `metrics_frame`, or its rows.
        labels: of the lines, by run folder; None: the name and the layout of the run.
        colours: likewise; None: one after the other.
    """
    figure, axis = new_figure(WIDTH, 4.6)
    curves: dict[str, list[dict[Any, Any]]] = {}
    for row in records_of(steps):
        curves.setdefault(row["run"], []).append(row)
    for place, (run, rows) in enumerate(curves.items()):
        rows = sorted((row for row in rows if _is_number(row.get(meter.LOSS))), key=lambda row: row["step"])
        chosen = thinned(rows)
        first = curves[run][0]
        label = labels[run] if labels else f"{first['name']} ({first['layout.label']})"
        (line,) = axis.plot(
            [row.get(meter.TOKENS_SEEN) or 0 for row in chosen],
            [row[meter.LOSS] for row in chosen],
            color=(colours or {}).get(run, SERIES[place % len(SERIES)]),
            linestyle=LINE_STYLES[place // len(SERIES) % len(LINE_STYLES)],
            # The same training under two layouts gives the same curve: the wider line stays visible on both sides.
            linewidth=1.4 + max(0, min(len(curves), MOST_LINES) - 1 - place) * 0.6,
            solid_capstyle="butt",
            dash_capstyle="butt",
            label=legend_text(label, most=34) if place < MOST_LINES else None,
        )
        last = f", last {significant(rows[-1][meter.LOSS], 5)} at step {rows[-1]['step']}" if rows else ": no loss"
        figure.trace(line, runs=[run], columns=[meter.LOSS, meter.TOKENS_SEEN], text=f"{label}{last}")
    axis.set_xlabel("tokens trained on")
    axis.set_ylabel("loss (nats per token)")
    axis.xaxis.set_major_formatter(lambda value, _: short(value, digits=2))
    axis.grid(axis="y", color=GRID, linewidth=0.8)
    if curves:
        more = f"… and {len(curves) - MOST_LINES} more" if len(curves) > MOST_LINES else None
        figure.legend(
            loc="outside right upper", fontsize=8.5, frameon=False, title=more, title_fontsize=8.5, labelcolor=INK
        )
    else:
        show_text(axis, "no step has been logged")
    set_title(axis, "loss against tokens")
    figure.has_heading = True
    return figure


def thinned(rows: Sequence[dict[Any, Any]], most: int = _MOST_POINTS) -> list[dict[Any, Any]]:
    """At most so many rows at equal distances, with the first and the last one."""
    if len(rows) <= most:
        return list(rows)
    return [rows[round(place * (len(rows) - 1) / (most - 1))] for place in range(most)]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
