"""How the runs of each recipe ended, or their current states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from titanlab.records.outcome import OutcomeKind
from titanlab.report.figures.records import records_of
from titanlab.report.figures.style import (
    BAR,
    FRAME,
    GREEN,
    GREY,
    MOST_BARS,
    RED,
    SKY,
    WHITE,
    WIDTH,
    YELLOW,
    label_bars,
    new_figure,
    set_title,
)
from titanlab.sweep.comparison import groups
from titanlab.sweep.listing import tone, word

if TYPE_CHECKING:
    from pandas import DataFrame

    from titanlab.report.figures.traced import TracedFigure

_TONES = {"good": GREEN, "busy": SKY, "idle": GREY, "halted": YELLOW, "bad": RED}
# Outcomes also differ in black and white, and bad outcomes, which share a colour, differ from each other.
_HATCHES = {
    "crash": "xx",
    "oom": "//",
    "hang": "\\\\",
    "nan": "..",
    "data": "++",
    "node_fail": "oo",
    "infeasible": "--",
}


def outcomes(runs: DataFrame | Sequence[Mapping[str, Any]]) -> TracedFigure:
    """The outcomes or current states of each recipe's runs; dropped points have bars of their own.

    Args:
        runs: the frame of `sweep_frame`, or the rows of a table.
    """
    from matplotlib.ticker import MaxNLocator

    rows = records_of(runs)
    counts = [(group.label, Counter(map(word, group.rows))) for group in groups(rows)]
    unknown = [row for row in rows if row["layout.label"] is None and row["state"] != "dropped"]
    counts += [("(no folder)", Counter(map(word, unknown)))] if unknown else []
    stages = Counter(row["dropped_stage"] for row in rows if row["state"] == "dropped")
    counts += [(f"(dropped: {stage})", Counter({"dropped": count})) for stage, count in stages.items()]
    colours = {word(row): _TONES[tone(row)] for row in rows}
    kinds = [kind.value for kind in OutcomeKind]
    order = [*kinds, *sorted({*colours} - {*kinds, "dropped"}), "dropped"]
    shown = counts[:MOST_BARS]
    figure, axis = new_figure(WIDTH, FRAME + BAR * max(1, len(shown)))
    for name in order:
        starts = [sum(by_word[earlier] for earlier in order[: order.index(name)]) for _, by_word in shown]
        lengths = [by_word[name] for _, by_word in shown]
        if any(lengths):
            axis.barh(
                range(len(shown)),
                lengths,
                left=starts,
                height=0.72,
                color=colours.get(name, GREY),
                edgecolor=WHITE,
                hatch=_HATCHES.get(name),
                label=f"{name} ({sum(by_word[name] for _, by_word in counts)})",
            )
    label_bars(axis, [label for label, _ in shown], len(counts))
    axis.set_xlabel("runs, or points")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    if shown:
        figure.legend(loc="outside right upper", fontsize=8.5, frameon=False)
    set_title(axis, "outcomes")
    figure.has_heading = True
    return figure
