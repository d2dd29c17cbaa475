"""An empty figure, and the colours and labels that the figures of analyses share with all others.

The colours of Okabe and Ito (Color Universal Design, 2008) suit all kinds of colour vision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE = "#0072b2"
SERIES = (BLUE, "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
LINE_STYLES = ("solid", (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)))
INK, MUTED = "#333333", "#666666"
OVERSUBSCRIBED: dict[str, Any] = {"facecolor": "#d9e6ef", "hatch": "////", "edgecolor": BLUE}
OVERSUBSCRIBED_TEXT = "oversubscribed: more processes than cores, so that the speed says nothing"
WIDTH = 8.0  # inches


def new_figure(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure with one pair of axes; sizes in inches."""
    from matplotlib.figure import Figure as NewFigure

    figure = NewFigure(figsize=(width, height), layout="constrained", dpi=110)
    axis = figure.subplots()
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    axis.tick_params(labelsize=8.5, colors=INK)
    return figure, axis


def label_bars(axis: Axes, labels: list[str], count: int) -> None:
    """Write the labels of the bars, with the first bar on top.

    Args:
        count: number of all bars, also of those that are not shown.
    """
    axis.set_yticks(range(len(labels)), [label.replace("$", r"\$") for label in labels])
    axis.set_ylim(max(1, len(labels)) - 0.5, -0.5)
    axis.tick_params(axis="y", length=0)
    if count > len(labels):
        axis.set_ylabel(f"the first {len(labels)} of {count}", fontsize=8.5)
    if not labels:
        axis.set_yticks([])
        show_text(axis, "no run")


def set_title(axis: Axes, title: str) -> None:
    axis.set_title(title, loc="left", fontsize=11)
    axis.xaxis.label.set_fontsize(9)
    axis.yaxis.label.set_fontsize(9)


def show_text(axis: Axes, text: str) -> None:
    """Show a text in the middle of empty axes."""
    axis.text(0.5, 0.5, text, transform=axis.transAxes, ha="center", va="center", color=MUTED)
