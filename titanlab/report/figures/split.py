"""What the time of a step goes to, by recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from titanlab.report.figures.style import (
    BAR,
    BLUE,
    FRAME,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    WHITE,
    WIDTH,
    YELLOW,
    label_bars,
    new_figure,
    set_title,
)
from titanlab.system.text import short_span

if TYPE_CHECKING:
    from titanlab.report.figures.traced import TracedFigure

# Colour and hatch of each part: communication is orange and red, with a hatch for each axis.
_LOOKS: Mapping[str, tuple[str, str | None]] = {
    "compute": (BLUE, None),
    "forward": (BLUE, None),
    "backward": (SKY, None),
    "replicate": (ORANGE, None),
    "shard": (ORANGE, "//"),
    "tensor": (RED, None),
    "context": (RED, "\\\\"),
    "pipeline": (RED, ".."),
    "expert": (RED, "++"),
    "bubble": (GREY, "xx"),
    "optimizer": (PURPLE, None),
    "data": (YELLOW, None),
    "checkpoint": (YELLOW, "//"),
    "stragglers": (GREY, "//"),
    "other": (GREY, None),
}
COMMUNICATION = ("replicate", "shard", "tensor", "context", "pipeline", "expert")


@dataclass(frozen=True, kw_only=True)
class Split:
    """The parts of one run's step.

    Attributes:
        run: its folder.
        label: of its recipe.
        seconds: by part; an axis stands for communication that nothing hides.
        columns: where they come from.
        is_measured: False: an estimate of the planner.
    """

    run: str
    label: str
    seconds: Mapping[str, float]
    columns: Sequence[str] = field(default=())
    is_measured: bool = True


def step_time_split(splits: Sequence[Split]) -> TracedFigure:
    """Stacked bars of a step's seconds, one bar for each recipe; estimates are labelled as such."""
    figure, axis = new_figure(WIDTH, FRAME + 0.3 + BAR * max(1, len(splits)))
    order = [name for name in _LOOKS if any(split.seconds.get(name) for split in splits)]
    order += sorted({name for split in splits for name, value in split.seconds.items() if value} - {*_LOOKS})
    longest = max((sum(split.seconds.values()) for split in splits), default=0.0) or 1.0
    labelled = set[str]()
    for place, split in enumerate(splits):
        left = 0.0
        for name in order:
            seconds = split.seconds.get(name) or 0.0
            if seconds <= 0:
                continue
            colour, hatch = _LOOKS.get(name, (GREY, "oo"))
            text = part_name(name)
            look: dict[str, Any] = {"facecolor": colour, "hatch": hatch, "edgecolor": WHITE, "linewidth": 0.6}
            label = None if name in labelled else text
            (bar,) = axis.barh(place, seconds, left=left, height=0.72, label=label, **look)
            labelled.add(name)
            description = f"{split.label}: {text} {short_span(seconds)}{'' if split.is_measured else ', estimated'}"
            figure.trace(bar, runs=[split.run], columns=split.columns, text=description)
            left += seconds
        text = short_span(left) + ("" if split.is_measured else " (estimate)")
        axis.text(left + 0.012 * longest, place, text, va="center", fontsize=8.5, color=INK)
    axis.set_xlim(0, longest * 1.25)
    label_bars(axis, [split.label for split in splits], len(splits))
    axis.set_xlabel("seconds of a step")
    if splits:
        figure.legend(loc="outside lower left", ncols=4, fontsize=8.5, frameon=False, labelcolor=INK)
    kind = "time of a step" if any(split.is_measured for split in splits) else "time of a step, estimated"
    set_title(axis, kind)
    figure.has_heading = True
    return figure


def part_name(name: str) -> str:
    """A part in words: an axis stands for its communication."""
    if name == "bubble":
        # A timeline has the idle share of all ranks, which is another number.
        return "bubble of the busiest rank"
    return f"exposed: {name}" if name in COMMUNICATION else name
