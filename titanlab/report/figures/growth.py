"""Lines over what grows in a sweep: efficiency against devices, speed and memory against the length of sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from titanlab.report.figures import style
from titanlab.sweep import RecipeRuns
from titanlab.system import grouped, significant

if TYPE_CHECKING:
    from titanlab.report.figures.traced import TracedFigure


@dataclass(frozen=True, kw_only=True)
class GrowthPoint:
    """One recipe; `band` is the interval of 95 % around its value, None: unknown."""

    group: RecipeRuns
    size: int
    value: float
    band: tuple[float, float] | None = None


@dataclass(frozen=True, kw_only=True)
class GrowthPanel:
    """One pair of axes.

    Attributes:
        column: of the table, from which the values are drawn.
        series: the points of each line, by its name; the line joins the best points of each size.
        ideal: drawn as a dashed line; None: there is none.
        is_speed: whether oversubscribed and emulated recipes say nothing here, and are hollow marks beside the line.
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
            best = {point.size: point.value for point in sorted(sound, key=lambda point: point.value)}
            label = style.legend_text(name) if number == 0 else None
            axis.plot(*zip(*sorted(best.items()), strict=True), **look, zorder=2, label=label) if best else None
            for point in points:
                if point.band is not None and point in sound:
                    axis.plot([point.size] * 2, point.band, color=style.INK, linewidth=1.0, marker="_", zorder=3)
                hollow = style.point_look(look["color"], hollow=point not in sound)
                (mark,) = axis.plot(point.size, point.value, "o", markersize=6, zorder=4, **hollow)
                done = [row["run"] for row in point.group.rows if row["outcome"] == "done"]
                text = (
                    f"{point.group.label}: {significant(point.value, 4)} {panel.label}, {grouped(point.size)} {across}"
                )
                figure.trace(mark, runs=done, columns=[panel.column], text=text)
        highest = max((point.value for points in panel.series.values() for point in points), default=1.0)
        axis.set_ylim(0, 1.1 * max(highest, panel.ideal or 0.0))
        axis.yaxis.set_major_formatter(lambda value, _: grouped(value) if abs(value) >= 10 else significant(value, 2))
    style.add_legend(figure, "lower left", ncols=2)
    return figure
