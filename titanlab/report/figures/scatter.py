"""A mark for each recipe: speed against memory with the Pareto front, estimates against measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from titanlab.report.figures import style
from titanlab.sweep import RecipeRuns, groups, state_tone, state_word
from titanlab.sweep import runs as without_dropped
from titanlab.system import counted, grouped, significant

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame

    from titanlab.report.figures.traced import TracedFigure


SPEEDS = {
    "tokens_per_second": "tokens per second of one device",
    "mfu_percent": "MFU, % of the device's peak",
}
MEMORY, ESTIMATED_MEMORY = "memory_gib", "estimate.memory_gib"
_MOST_NUMBERS, _MANY = 12, 60
_FAR = 0.6  # the axis begins at 0 if the smallest speed is below this share of the largest
_NEAR = 0.03  # share of an axis within which numbers would cover each other


class ParetoPoint(NamedTuple):
    """One recipe: the median of its memory and the geometric mean of its speed, over its runs that are done."""

    group: RecipeRuns
    memory: float
    speed: float


def pareto(runs: DataFrame | Sequence[Mapping[str, Any]], *, speed: str = "tokens_per_second") -> TracedFigure:
    """Peak memory against speed; a line joins the recipes that no other one beats in both.

    Crosses are failed runs: in the figure if their memory and speed were measured, else in the strip below, at their
    measured or estimated memory.

    Args:
        speed: `tokens_per_second` or `mfu_percent`.
    """
    rows = style.records_of(runs)
    points = points_of(rows, speed)
    failed = [row for row in without_dropped(rows) if row["state"] == "ended" and state_tone(row) in ("bad", "halted")]
    figure = style.empty_figure(style.WIDTH, 4.8 if failed else 4.4)
    figure.has_heading = True
    strip: Axes | None = None
    if failed:
        axis, strip = figure.subplots(2, 1, sharex=True, height_ratios=[9, 1])
        style.set_axis(strip)
        strip.set_yticks([0], ["failed"])
        strip.set_ylim(-1, 1)
        strip.tick_params(axis="y", length=0)
    else:
        axis = figure.subplots()
    style.set_axis(axis, f"memory against {'MFU' if speed == 'mfu_percent' else 'tokens per second'}")
    drawn = _draw_failures(figure, axis, strip, failed, speed)
    front = front_of(points)
    if len(front) > 1:
        stairs = [(point.memory, point.speed) for point in front]
        axis.step(*zip(*stairs, strict=True), where="post", color=style.MUTED, linewidth=1.4, zorder=1)
    best = {id(point) for point in front}
    colours = style.recipe_colours(rows)
    size = 6.5 if len(points) <= _MANY else 4.0
    for point in sorted(points, key=lambda point: id(point) in best):
        colour = colours.get(point.group.rows[0]["run"], style.BLUE)
        shape, larger = ("D", 1) if id(point) in best else ("o", 0)
        look = style.point_look(colour, hollow=point.group.is_oversubscribed)
        (mark,) = axis.plot(point.memory, point.speed, shape, markersize=size + larger, **look)
        description = f"{point.group.label}: {significant(point.speed, 4)} {SPEEDS[speed]}, {point.memory:.2f} GiB"
        done = [row["run"] for row in point.group.rows if row["outcome"] == "done"]
        figure.trace(mark, runs=done, columns=[MEMORY, speed], text=description)
    # The axis of speed begins at 0, unless this would put all points at the top.
    low, high = axis.get_ylim()
    speeds = [point.speed for point in points]
    is_far = bool(speeds) and min(speeds) > _FAR * max(speeds) and low > 0
    axis.set_ylim(low if is_far else 0, high + 0.04 * (high - low))
    _number(figure, axis, points if len(points) <= _MOST_NUMBERS else front)
    if not points and not drawn:
        style.show_text(axis, "no run has been measured")
    axis.set_ylabel(SPEEDS[speed])
    axis.grid(color=style.GRID, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.yaxis.set_major_formatter(lambda value, _: grouped(value) if abs(value) >= 10 else significant(value, 2))
    (strip or axis).set_xlabel("GiB of memory at the peak, of one device or process")
    return figure


def points_of(rows: Sequence[Mapping[str, Any]], speed: str) -> list[ParetoPoint]:
    """The recipes whose memory and speed were measured."""
    measured = [(group, group.typical(MEMORY), group.typical(speed)) for group in groups(rows)]
    return [
        ParetoPoint(group, memory, rate) for group, memory, rate in measured if memory is not None and rate is not None
    ]


def front_of(points: Sequence[ParetoPoint]) -> list[ParetoPoint]:
    """The Pareto front, by memory: every faster recipe needs more memory. Recipes without `has_speed` are left out."""
    front: list[ParetoPoint] = []
    for point in sorted(points, key=lambda point: (point.memory, -point.speed)):
        if point.group.has_speed and (not front or point.speed > front[-1].speed):
            front.append(point)
    return front


def _draw_failures(
    figure: TracedFigure, axis: Axes, strip: Axes | None, failed: Sequence[Mapping[str, Any]], speed: str
) -> int:
    """Draw a cross for each failed run whose memory is known; return the number of crosses."""
    unknown = []
    for row in failed:
        memory, rate = row[MEMORY], row[speed]
        columns = [MEMORY, speed, "outcome"]
        if memory is None:
            memory, rate, columns = row.get(ESTIMATED_MEMORY), None, [ESTIMATED_MEMORY, "outcome"]
        if memory is None:
            unknown.append(row["run"])
            continue
        place = axis if rate is not None else strip
        assert place is not None
        (cross,) = place.plot(
            memory, 0 if rate is None else rate, "x", markersize=7, markeredgewidth=1.8, color=style.RED, clip_on=False
        )
        basis = "" if columns[0] == MEMORY else " by the estimate"
        description = f"{row['run']}: {state_word(row)}, {memory:.2f} GiB{basis}"
        figure.trace(cross, runs=[row["run"]], columns=columns, text=description)
    if unknown and strip is not None:
        text = f"{counted(len(unknown), 'failed run')} of unknown memory"
        note = strip.text(
            0.995, 0.5, text, transform=strip.transAxes, ha="right", va="center", fontsize=8, color=style.MUTED
        )
        figure.trace(note, runs=unknown, columns=["outcome"], text=text)
    return len(failed) - len(unknown)


def _number(figure: TracedFigure, axis: Axes, points: Sequence[ParetoPoint]) -> None:
    """Number points, and list them on the right; numbers of points that nearly coincide stand together."""
    from matplotlib.lines import Line2D

    chosen = sorted(points, key=lambda point: -point.speed)[:_MOST_NUMBERS]
    across, up = (high - low for low, high in (axis.get_xlim(), axis.get_ylim()))
    placed: list[tuple[float, float, list[int]]] = []
    for number, point in enumerate(chosen, 1):
        near = [
            numbers
            for memory, speed, numbers in placed
            if abs(memory - point.memory) < _NEAR * across and abs(speed - point.speed) < _NEAR * up
        ]
        if near:
            near[0].append(number)
        else:
            placed.append((point.memory, point.speed, [number]))
    for memory, speed, numbers in placed:
        look: dict[str, Any] = {"ha": "right", "fontsize": 8.5, "color": style.INK}
        axis.annotate(", ".join(map(str, numbers)), (memory, speed), (-6, 4), textcoords="offset points", **look)
    handles = [Line2D([], [], linestyle="none") for _ in chosen]
    labels = [f"{number}  {style.label_text(point.group.label, most=34)}" for number, point in enumerate(chosen, 1)]
    if any(point.group.is_oversubscribed for point in points):
        handles.append(style.hollow_mark())
        labels.append(style.OVERSUBSCRIBED_TEXT.replace(": ", ":\n").replace(", so", ",\nso"))
    if handles:
        style.add_legend(figure, "right upper", handles=handles, labels=labels, handlelength=0.8)


# For each plot: the column of the measurement, the column of the estimate, the title, the unit.
PAIRS = (
    ("step_seconds", "estimate.step_seconds", "time of a step", "s"),
    ("memory_gib", "estimate.memory_gib", "memory", "GiB"),
)
_BAND = 0.2
_SPREAD = 8.0  # axes are logarithmic if the largest value is more than this many times the smallest


def estimate_against_measurement(runs: DataFrame | Sequence[Mapping[str, Any]]) -> TracedFigure:
    """A point for each run that is done: on the line the estimate is right, between the dashed lines within 20 %."""
    rows = style.records_of(runs)
    figure = style.empty_figure(style.WIDTH, 3.9)
    for axis, (measured_column, estimated_column, title, unit) in zip(figure.subplots(1, 2), PAIRS, strict=True):
        style.set_axis(axis, title)
        axis.set_xlabel(f"estimate ({unit})")
        axis.set_ylabel(f"measured ({unit})")
        points = compared(rows, measured_column, estimated_column)
        if not points:
            style.show_text(axis, "no run has both")
            continue
        values = [value for _, *pair in points for value in pair]
        least, most = min(values), max(values)
        low, high = 0.0, most * 1.12
        if most > _SPREAD * least:
            low, high = least / 1.5, most * 1.5
            axis.set_xscale("log")
            axis.set_yscale("log")
        for share in (1.0, 1 + _BAND, 1 - _BAND):
            look: dict[str, Any] = {"color": style.MUTED, "linewidth": 0.9, "zorder": 1}
            axis.plot([low, high], [share * low, share * high], ls="solid" if share == 1 else (0, (3, 2)), **look)
        for row, measured, estimated in points:
            hollow = bool(row["oversubscribed"]) and measured_column == "step_seconds"
            (point,) = axis.plot(
                estimated, measured, "o", markersize=5.5, **style.point_look(style.BLUE, hollow=hollow)
            )
            text = f"{row['run']}: measured {significant(measured)} {unit}, estimate {significant(estimated)} {unit}"
            text += f" ({100 * (estimated / measured - 1):+.0f} %)"
            figure.trace(point, runs=[row["run"]], columns=(measured_column, estimated_column), text=text)
        axis.set_xlim(low, high)
        axis.set_ylim(low, high)
        axis.grid(color=style.GRID, linewidth=0.6)
        axis.set_axisbelow(True)
    if any(row["oversubscribed"] for row, _, _ in compared(rows, *PAIRS[0][:2])):
        style.add_legend(figure, "lower left", handles=[style.hollow_mark()], labels=[style.OVERSUBSCRIBED_TEXT])
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
