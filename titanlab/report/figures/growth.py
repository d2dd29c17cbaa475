"""Lines over what grows in a sweep: efficiency against devices, speed and memory against the length of sequences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from titanlab.report.figures import style
from titanlab.sweep import RecipeRuns, state_word
from titanlab.system import grouped, significant

if TYPE_CHECKING:
    from titanlab.report.figures.traced import TracedFigure


@dataclass(frozen=True)
class GrowthPoint:
    """One recipe; `band` is the interval of 95 % around its value, or None if unknown.

    Attributes:
        value: the efficiency, speed or memory; None: no run of the recipe is done.
    """

    group: RecipeRuns
    size: int
    value: float | None
    band: tuple[float, float] | None = None


@dataclass(frozen=True, kw_only=True)
class GrowthPanel:
    """One pair of axes.

    Attributes:
        column: the column of the sweep's table from which the values come.
        series: the points of each line, by its name; the line joins the best points of each size.
        ideal: the ideal value, drawn as a dashed line; None: there is none.
        is_speed: whether values are speeds; those of oversubscribed or emulated recipes are hollow marks off the line.
    """

    label: str
    column: str
    series: Mapping[str, Sequence[GrowthPoint]]
    ideal: float | None = None
    is_speed: bool = True


def growth(title: str, across: str, panels: Sequence[GrowthPanel]) -> TracedFigure:
    """Panels side by side, over sizes on a logarithmic axis."""
    figure = style.empty_figure(style.WIDTH, 3.9)
    figure.has_heading = True
    for number, (axis, panel) in enumerate(zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True)):
        style.set_axis(axis, "" if number else title)
        axis.set_xscale("log", base=2)
        sizes = sorted({point.size for points in panel.series.values() for point in points})
        axis.set_xticks(sizes, [grouped(size) for size in sizes])
        axis.minorticks_off()
        axis.set_xlabel(across)
        axis.set_ylabel(panel.label)
        axis.grid(color=style.GRID, linewidth=0.6)
        axis.set_axisbelow(True)
        if panel.ideal is not None:
            axis.axhline(panel.ideal, color=style.MUTED, linewidth=0.9, linestyle=(0, (3, 2)), zorder=1)
        for place, (name, points) in enumerate(panel.series.items()):
            look = style.line_look(place, len(panel.series))
            sound = [point for point in points if point.group.has_speed or not panel.is_speed]
            # A line has a gap where a size has no value.
            best: dict[int, float] = {}
            for point in sound:
                known = best.get(point.size, math.nan)
                best[point.size] = known if point.value is None else max(point.value, known)
            label = style.legend_text(name) if number == 0 else None
            axis.plot(*zip(*sorted(best.items()), strict=True), **look, zorder=2, label=label) if best else None
            for point in points:
                done = [row["run"] for row in point.group.rows if row["outcome"] == "done"]
                if point.value is None:
                    ends = ", ".join(sorted({state_word(row) for row in point.group.rows}))
                    (mark,) = axis.plot(
                        point.size, 0, "x", color=style.RED, markersize=8, mew=2, clip_on=False, zorder=5
                    )
                    words = f"{point.group.label}: {ends}, {grouped(point.size)} {across}"
                    runs = [row["run"] for row in point.group.rows]
                    figure.trace(mark, runs=runs, columns=["outcome", "state"], text=words)
                    note = {"xytext": (0, 7), "textcoords": "offset points", "ha": "center", "fontsize": 8.5}
                    axis.annotate(ends, (point.size, 0), color=style.INK, **note)
                    continue
                if point.band is not None and point in sound:
                    axis.plot([point.size] * 2, point.band, color=style.INK, linewidth=1.0, marker="_", zorder=3)
                hollow = style.point_look(look["color"], hollow=point not in sound)
                (mark,) = axis.plot(point.size, point.value, "o", markersize=6, zorder=4, **hollow)
                text = (
                    f"{point.group.label}: {significant(point.value, 4)} {panel.label}, {grouped(point.size)} {across}"
                )
                figure.trace(mark, runs=done, columns=[panel.column], text=text)
        values = [point.value for points in panel.series.values() for point in points if point.value is not None]
        highest = max(values, default=1.0)
        axis.set_ylim(0, 1.1 * max(highest, panel.ideal or 0.0))
        axis.yaxis.set_major_formatter(lambda value, _: grouped(value) if abs(value) >= 10 else significant(value, 2))
    style.add_legend(figure, "lower left", ncols=2)
    return figure
