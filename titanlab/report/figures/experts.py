"""The load of experts: a map of blocks and experts, one for each recipe or group of recipes with the same counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from titanlab.report.figures.style import INK, WIDTH, empty_figure, label_text, set_axis
from titanlab.system.text import counted

if TYPE_CHECKING:
    from titanlab.report.figures.traced import TracedFigure

COLUMNS = ("experts/counts",)
MOST_MAPS = 6
# Colours end at a quarter and at four times the equal share: 2 and -2 as powers of two.
_END = 2.0
_LEAST, _MOST = 0.9, 3.4  # inches: height of a map
_NO_TOKEN = "#000000"


@dataclass(frozen=True, kw_only=True)
class ExpertLoad:
    """The load of one recipe's experts.

    Attributes:
        runs: folders of the runs that have these counts.
        label: of their recipes.
        step: after which they were written.
        steps: number of steps that they are sums of.
        counts: tokens by block and expert.
    """

    runs: Sequence[str]
    label: str
    step: int
    steps: int
    counts: Sequence[Sequence[float]]

    @property
    def span(self) -> str:
        """The steps that the counts are sums of."""
        return f"step {self.step}" if self.steps == 1 else f"steps {self.step - self.steps + 1:,} to {self.step:,}"

    @cached_property
    def shares(self) -> list[list[float]]:
        """Tokens by block and expert, relative to an equal share of the block's."""
        means = [sum(row) / len(row) or 1.0 for row in self.counts]
        return [[count / mean for count in row] for row, mean in zip(self.counts, means, strict=True)]

    def extreme(self, *, most: bool) -> tuple[float, int, int]:
        """The largest or the smallest share, with its block and expert."""
        places = ((share, block, expert) for block, row in enumerate(self.shares) for expert, share in enumerate(row))
        return (max if most else min)(places, key=lambda place: place[0])

    @property
    def idle(self) -> int:
        """Number of experts without a token."""
        return sum(not count for row in self.counts for count in row)

    def __str__(self) -> str:
        (most, *high), (least, *low) = self.extreme(most=True), self.extreme(most=False)
        idle = f"; {counted(self.idle, 'expert')} without a token" if self.idle else ""
        return (
            f"{self.label}, {self.span}: at most {most:.2f} of an equal share (block {high[0]}, expert {high[1]}), "
            f"at least {least:.2f} (block {low[0]}, expert {low[1]}){idle}"
        )


def expert_load(loads: Sequence[ExpertLoad]) -> TracedFigure:
    """Maps of blocks by experts: the share of tokens relative to an equal one, on a logarithmic scale of colours."""
    # Imported here: matplotlib is an optional package.
    import numpy as np
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize
    from matplotlib.ticker import MaxNLocator

    heights = [min(max(0.16 * len(load.counts), _LEAST), _MOST) for load in loads]
    figure = empty_figure(WIDTH, sum(heights) + 0.75 * len(loads) + 0.2)
    axes = figure.subplots(len(loads), 1, squeeze=False, height_ratios=heights)[:, 0]
    # From purple through pale to orange, without the darkest ends, so that black is another colour.
    colours = ListedColormap(colormaps["PuOr_r"](np.linspace(0.12, 0.88, 256))).with_extremes(under=_NO_TOKEN)
    for axis, load in zip(axes, loads, strict=True):
        shares = np.asarray(load.shares)
        with np.errstate(divide="ignore"):
            powers = np.where(shares > 0, np.clip(np.log2(shares), -_END, _END), -math.inf)
        image = axis.imshow(powers, cmap=colours, vmin=-_END, vmax=_END, aspect="auto", interpolation="none")
        set_axis(axis)
        for place in (axis.xaxis, axis.yaxis):
            place.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axis.set_ylabel("block", fontsize=9, color=INK)
        title = f"{label_text(load.label, most=70)} · {load.span}"
        axis.set_title(title, loc="left", fontsize=9.5, color=INK)
        figure.trace(image, runs=load.runs, columns=COLUMNS, text=str(load))
    axes[-1].set_xlabel("expert", fontsize=9, color=INK)
    scale = ScalarMappable(Normalize(-_END, _END), colours)
    bar = figure.colorbar(scale, ax=list(axes), ticks=(-2, -1, 0, 1, 2), fraction=0.04, pad=0.01)
    bar.ax.set_yticklabels(["¼", "½", "1", "2", "4"], fontsize=8.5, color=INK)
    bar.set_label("tokens, of an equal share", fontsize=9, color=INK)
    return figure
