"""The pipelines of a sweep as timelines, one panel for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from titanlab.report.figures.style import INK, empty_figure, label_text
from titanlab.schedule.plot import draw_legend, draw_panel, figure_size
from titanlab.schedule.timeline import Timeline

if TYPE_CHECKING:
    from titanlab.report.figures.traced import TracedFigure

COLUMNS = ("schedule", "layout.pipeline", "microbatch")


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """The timeline of one recipe's pipeline.

    Attributes:
        run: a run of the recipe.
        label: of the recipe.
        timeline: simulated.
        unit: of its times; empty: of the forward pass of a stage.
    """

    run: str
    label: str
    timeline: Timeline
    unit: str = ""

    @property
    def cells(self) -> int:
        """Actions in the timeline."""
        return sum(map(len, self.timeline.events))


def pipeline_timelines(pipelines: Sequence[Pipeline]) -> TracedFigure:
    """Simulated timelines, one panel below the other; each has its own scale of time."""
    timelines = [pipeline.timeline for pipeline in pipelines]
    width, height = figure_size(timelines)
    figure = empty_figure(width, height + 0.15 * len(pipelines))
    heights = [len(timeline.events) for timeline in timelines]
    axes = figure.subplots(len(pipelines), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axis, pipeline in zip(axes, pipelines, strict=True):
        timeline, bubble = pipeline.timeline, f"idle {100 * pipeline.timeline.bubble_share:.1f} % of all ranks' time"
        title = f"{label_text(pipeline.label, most=60)} · {bubble}"
        idle = draw_panel(axis, title, timeline, longest=timeline.duration, width=width)
        for rank, (row, peak) in enumerate(zip(idle, timeline.peak_in_flight, strict=True)):
            noun = "microbatch" if peak == 1 else "microbatches"
            description = f"{pipeline.label}: rank {rank} keeps {peak:.3g} {noun} at most"
            figure.trace(row, runs=[pipeline.run], columns=COLUMNS, text=description)
        axis.set_xlabel(f"time ({pipeline.unit or 'forward passes of a stage'})", fontsize=8, color=INK)
    draw_legend(figure, timelines)
    return figure
