"""Figures over time: losses, loads of experts, and the timeline of a pipeline."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from titanlab.costs import meter
from titanlab.report.figures import style
from titanlab.system import counted, short, significant
from titanlab.techniques.schedule.action import Timeline
from titanlab.techniques.schedule.plot import draw_legend, draw_panel, figure_size

if TYPE_CHECKING:
    from pandas import DataFrame

    from titanlab.report.figures.traced import TracedFigure


# More points cannot be distinguished in a figure of 8 inches.
_MOST_POINTS = 400


def loss_by_tokens(
    steps: DataFrame | Sequence[Mapping[str, Any]],
    *,
    labels: Mapping[str, str] | None = None,
    colours: Mapping[str, str] | None = None,
) -> TracedFigure:
    """Training loss against tokens, one line for each run; lines that cover each other have different widths.

    Args:
        labels: labels of the lines, by run folder; None: the name and the layout of the run.
        colours: colours of the lines, by run folder; None: those of `style.SERIES` in order.
    """
    figure, axis = style.new_figure(4.6, "loss against tokens")
    curves: dict[str, list[dict[Any, Any]]] = {}
    for row in style.records_of(steps):
        curves.setdefault(row["run"], []).append(row)
    for place, (run, logged) in enumerate(curves.items()):
        # In a damaged row the loss may be a boolean, a text or missing.
        rows = [row for row in logged if type(row.get(meter.LOSS)) in (int, float) and math.isfinite(row[meter.LOSS])]
        rows.sort(key=lambda row: row["step"])
        chosen = thinned(rows)
        first = curves[run][0]
        label = labels[run] if labels else f"{first['name']} ({first['layout.label']})"
        look = style.line_look(place, len(curves))
        (line,) = axis.plot(
            [row.get(meter.TOKENS_SEEN) or 0 for row in chosen],
            [row[meter.LOSS] for row in chosen],
            **{**look, "color": (colours or {}).get(run, look["color"])},
            solid_capstyle="butt",
            dash_capstyle="butt",
            label=style.legend_text(label, most=34) if place < style.MOST_LINES else None,
        )
        last = f", last {significant(rows[-1][meter.LOSS], 5)} at step {rows[-1]['step']}" if rows else ": no loss"
        figure.trace(line, runs=[run], columns=[meter.LOSS, meter.TOKENS_SEEN], text=f"{label}{last}")
    axis.set_xlabel("tokens trained on")
    axis.set_ylabel("loss (nats per token)")
    axis.xaxis.set_major_formatter(lambda value, _: short(value, digits=2))
    axis.grid(axis="y", color=style.GRID, linewidth=0.8)
    style.add_line_legend(figure, axis, len(curves), "no step has been logged")
    return figure


def thinned(rows: Sequence[dict[Any, Any]], most: int = _MOST_POINTS) -> list[dict[Any, Any]]:
    """At most `most` rows at equal distances, including the first and the last one."""
    if len(rows) <= most:
        return list(rows)
    return [rows[round(place * (len(rows) - 1) / (most - 1))] for place in range(most)]


EXPERT_COLUMNS = ("experts/counts",)
MOST_MAPS = 6
# The scale of colours ends at 1/4 and at 4 times the equal share: 2 to the power of -_END and of _END.
_END = 2.0
_LEAST, _MOST = 0.9, 3.4  # inches: height of a map
_NO_TOKEN = "#000000"


@dataclass(frozen=True, kw_only=True)
class ExpertLoad:
    """The load of one recipe's experts.

    Attributes:
        runs: folders of the runs that have these counts.
        step: the step after which the counts were written.
        steps: number of steps over which the counts are summed.
        counts: tokens by block and expert.
    """

    runs: Sequence[str]
    label: str
    step: int
    steps: int
    counts: Sequence[Sequence[float]]

    @property
    def span(self) -> str:
        """The steps over which the counts are summed."""
        return f"step {self.step}" if self.steps == 1 else f"steps {self.step - self.steps + 1:,} to {self.step:,}"

    @cached_property
    def shares(self) -> np.ndarray:
        """Tokens by block and expert, relative to an equal share of the block's tokens."""
        counts = np.asarray(self.counts, dtype=float)
        means = counts.mean(axis=1, keepdims=True)
        return counts / np.where(means > 0, means, 1.0)

    def __str__(self) -> str:
        shares = self.shares
        (high, most), (low, least) = (
            divmod(int(place), shares.shape[1]) for place in (shares.argmax(), shares.argmin())
        )
        idle = int((shares == 0).sum())
        return (
            f"{self.label}, {self.span}: at most {shares.max():.2f} of an equal share (block {high}, expert {most}), "
            f"at least {shares.min():.2f} (block {low}, expert {least})"
            + (f"; {counted(idle, 'expert')} without a token" if idle else "")
        )


def expert_load(loads: Sequence[ExpertLoad]) -> TracedFigure:
    """Maps of blocks by experts: the share of tokens relative to an equal share, on a logarithmic scale of colours."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize
    from matplotlib.ticker import MaxNLocator

    heights = [min(max(0.16 * len(load.counts), _LEAST), _MOST) for load in loads]
    figure = style.empty_figure(style.WIDTH, sum(heights) + 0.75 * len(loads) + 0.2)
    axes = figure.subplots(len(loads), 1, squeeze=False, height_ratios=heights)[:, 0]
    # From purple through pale to orange, without the darkest ends, so that black (no token) differs from them.
    colours = ListedColormap(colormaps["PuOr_r"](np.linspace(0.12, 0.88, 256))).with_extremes(under=_NO_TOKEN)
    for axis, load in zip(axes, loads, strict=True):
        with np.errstate(divide="ignore"):
            powers = np.where(load.shares > 0, np.clip(np.log2(load.shares), -_END, _END), -math.inf)
        image = axis.imshow(powers, cmap=colours, vmin=-_END, vmax=_END, aspect="auto", interpolation="none")
        style.set_axis(axis, f"{style.label_text(load.label, most=70)} · {load.span}")
        for place in (axis.xaxis, axis.yaxis):
            place.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axis.set_ylabel("block")
        axis.title.set_fontsize(9.5)
        figure.trace(image, runs=load.runs, columns=EXPERT_COLUMNS, text=str(load))
    axes[-1].set_xlabel("expert")
    scale = ScalarMappable(Normalize(-_END, _END), colours)
    bar = figure.colorbar(scale, ax=list(axes), ticks=(-2, -1, 0, 1, 2), fraction=0.04, pad=0.01)
    bar.ax.set_yticklabels(["¼", "½", "1", "2", "4"], fontsize=8.5, color=style.INK)
    bar.set_label("tokens, of an equal share", fontsize=9, color=style.INK)
    return figure


TIMELINE_COLUMNS = ("schedule", "layout.pipeline", "microbatch")


@dataclass(frozen=True, kw_only=True)
class PipelineTimeline:
    """The timeline of one recipe's pipeline.

    Attributes:
        unit: unit of the timeline's times; empty: the time of a forward pass of a stage.
    """

    run: str
    label: str
    timeline: Timeline
    unit: str = ""


def pipeline_timelines(pipelines: Sequence[PipelineTimeline]) -> TracedFigure:
    """Simulated timelines, one panel below the other; each has its own scale of time."""
    timelines = [pipeline.timeline for pipeline in pipelines]
    width, height = figure_size(timelines)
    figure = style.empty_figure(width, height + 0.15 * len(pipelines))
    heights = [len(timeline.events) for timeline in timelines]
    axes = figure.subplots(len(pipelines), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axis, pipeline in zip(axes, pipelines, strict=True):
        timeline, bubble = pipeline.timeline, f"idle {100 * pipeline.timeline.bubble_share:.1f} % of all ranks' time"
        title = f"{style.label_text(pipeline.label, most=60)} · {bubble}"
        idle = draw_panel(axis, title, timeline, longest=timeline.duration, width=width)
        for rank, (row, peak) in enumerate(zip(idle, timeline.peak_in_flight, strict=True)):
            noun = "microbatch" if peak == 1 else "microbatches"
            description = f"{pipeline.label}: rank {rank} keeps {peak:.3g} {noun} at most"
            figure.trace(row, runs=[pipeline.run], columns=TIMELINE_COLUMNS, text=description)
        axis.set_xlabel(f"time ({pipeline.unit or 'forward passes of a stage'})", fontsize=8, color=style.INK)
    draw_legend(figure, timelines)
    return figure
