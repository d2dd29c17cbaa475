"""Colours, sizes and labels of all figures.

The colours of Okabe and Ito (Color Universal Design, 2008) suit all kinds of colour vision. Whatever a
colour shows is also shown by a hatch, a line style, a width or a shape.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from titanlab.sweep import groups

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from titanlab.report.figures.traced import TracedFigure


BLUE, ORANGE, GREEN, YELLOW = "#0072b2", "#e69f00", "#009e73", "#f0e442"
SKY, RED, PURPLE, GREY = "#56b4e9", "#d55e00", "#cc79a7", "#999999"
BLACK, WHITE = "#000000", "#ffffff"
INK, MUTED, GRID = "#333333", "#666666", "#e5e5e5"
PALE = "#d9e6ef"
SERIES = (BLUE, RED, GREEN, PURPLE, ORANGE, SKY, BLACK)
LINE_STYLES = ("solid", (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)))
OVERSUBSCRIBED: dict[str, Any] = {"facecolor": PALE, "hatch": "////", "edgecolor": BLUE}
OVERSUBSCRIBED_TEXT = "oversubscribed: more processes than cores, so that the speed says nothing"
WIDTH, BAR, FRAME = 8.0, 0.36, 1.3  # inches: width of a figure, height of one bar, height around all bars
MOST_BARS = 60
MOST_LINES = 14
_MOST_LETTERS = 44
# Unicode categories: control characters, halves of surrogate pairs, and format characters, some of which change the
# direction of writing. Characters that join letters or parts of an emoji are kept.
_UNPRINTABLE = ("Cc", "Cs", "Cf")
_JOINERS = "\u200c\u200d"


def new_figure(height: float, title: str) -> tuple[TracedFigure, Axes]:
    """A figure of a page's width with one pair of axes; `height` is in inches."""
    figure = empty_figure(WIDTH, height)
    axis = figure.subplots()
    set_axis(axis, title)
    figure.has_heading = True
    return figure, axis


def new_bars(count: int, title: str, *, above: float = FRAME, bar: float = BAR) -> tuple[TracedFigure, Axes]:
    """A figure that is high enough for this many bars."""
    return new_figure(above + bar * max(1, count), title)


def empty_figure(width: float, height: float) -> TracedFigure:
    """A figure without axes; sizes in inches."""
    # Imported here: matplotlib is an optional package.
    from titanlab.report.figures.traced import TracedFigure

    return TracedFigure(figsize=(width, height), layout="constrained", dpi=110)


def set_axis(axis: Axes, title: str = "") -> None:
    """Set what all axes share: title on the left, no frame above and on the right, small labels."""
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axis.spines[side].set_color(INK)
    axis.tick_params(labelsize=8.5, colors=INK)
    axis.set_title(title, loc="left", fontsize=11, color=INK)
    for label in (axis.xaxis.label, axis.yaxis.label):
        label.set_fontsize(9)
        label.set_color(INK)


def add_legend(figure: Figure, place: str, **more: Any) -> None:
    """Put a legend outside the axes, at a place such as `lower left`."""
    figure.legend(**{"loc": f"outside {place}", "fontsize": 8.5, "frameon": False, "labelcolor": INK, **more})


def add_line_legend(figure: Figure, axis: Axes, count: int, nothing: str) -> None:
    """Add the legend of `count` lines, with the number of lines that it leaves out; without lines, write `nothing`."""
    if count:
        more = f"… and {count - MOST_LINES} more" if count > MOST_LINES else None
        add_legend(figure, "right upper", title=more, title_fontsize=8.5)
    else:
        show_text(axis, nothing)


def explain_hatches(figure: Figure) -> None:
    from matplotlib.patches import Patch

    add_legend(figure, "lower left", handles=[Patch(label=OVERSUBSCRIBED_TEXT, **OVERSUBSCRIBED)])


def point_look(colour: str, *, hollow: bool) -> dict[str, Any]:
    """The look of a point; hollow points have a pale fill: their speed says nothing."""
    return {"color": PALE if hollow else colour, "mec": colour if hollow else INK, "mew": 0.8}


def hollow_mark() -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], ls="none", marker="o", ms=6, **point_look(BLUE, hollow=True))


def line_look(place: int, count: int) -> dict[str, Any]:
    """The look of one of several lines; the widths differ, so that lines that cover each other stay visible."""
    return {
        "color": SERIES[place % len(SERIES)],
        "linestyle": LINE_STYLES[place // len(SERIES) % len(LINE_STYLES)],
        "linewidth": 1.4 + max(0, min(count, MOST_LINES) - 1 - place) * 0.6,
    }


def show_text(axis: Axes, text: str) -> None:
    """Write a sentence in axes that have nothing to show."""
    axis.set_xticks([])
    axis.set_yticks([])
    axis.text(0.5, 0.5, text, transform=axis.transAxes, ha="center", va="center", color=MUTED)


def label_bars(axis: Axes, labels: list[str], count: int) -> None:
    """Write the labels of the bars, with the first bar on top.

    Args:
        count: number of all bars, also bars that are not shown.
    """
    axis.set_yticks(range(len(labels)), [label_text(label) for label in labels])
    axis.set_ylim(max(1, len(labels)) - 0.5, -0.5)
    axis.tick_params(axis="y", length=0)
    if count > len(labels):
        axis.set_ylabel(f"the first {len(labels)} of {count}", fontsize=8.5)
    if not labels:
        show_text(axis, "no run")


def printable(text: str, *, kept: str = "") -> str:
    """The text with a replacement for each character that has no shape, or that changes the direction of writing."""
    if text.isascii() and text.isprintable():
        return text
    shown = [*_JOINERS, *kept]
    return "".join(
        "\N{REPLACEMENT CHARACTER}" if unicodedata.category(letter) in _UNPRINTABLE and letter not in shown else letter
        for letter in text
    )


def label_text(text: str, *, most: int = _MOST_LETTERS) -> str:
    """A label for matplotlib: printable, of bounded length, and never read as a formula."""
    line = printable(" ".join(text.split()))
    if len(line) > most:
        # Shorten keys to their last word: `… · optimizer.lr 0.1` becomes `… · lr 0.1`.
        line = re.sub(r"(?<=· )(?:\w+\.)+(?=\w+ )", "", line)
    if len(line) > most:
        # Keep the end: names often differ there.
        end = most // 3
        line = f"{line[: most - end - 1]}…{line[-end:]}"
    return re.sub(r"\$", r"\\$", line)


def legend_text(text: str, *, most: int = _MOST_LETTERS) -> str:
    """A label of a legend, as `label_text`; matplotlib leaves out labels that begin with an underscore."""
    label = label_text(text, most=most)
    return f" {label}" if label.startswith("_") else label


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
    # Sort recipes by size and name, so that the order of a figure's bars does not change the colours.
    ordered = sorted(groups(rows), key=lambda group: (group.world or 0, group.label, group.is_control))
    if len(ordered) > MOST_LINES:
        return {}
    return {row["run"]: SERIES[place % len(SERIES)] for place, group in enumerate(ordered) for row in group.rows}
