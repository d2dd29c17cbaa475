"""The pipelines of a sweep as timelines: a panel for each, whose rows name their run."""

from __future__ import annotations

from titanlab.report.figures.over_time import TIMELINE_COLUMNS, PipelineTimeline, pipeline_timelines
from titanlab.techniques.schedule.published_schema import OneFOneB
from titanlab.techniques.schedule.timeline import simulate


def timeline(microbatches, ranks=2):
    schedule = OneFOneB()
    return simulate(schedule.actions(ranks=ranks, microbatches=microbatches), schedule.placement(ranks=ranks))


def test_a_panel_for_each_pipeline():
    schedule = OneFOneB()
    timelines = [
        simulate(schedule.actions(ranks=2, microbatches=count), schedule.placement(ranks=2)) for count in (2, 4)
    ]
    pipelines = [
        PipelineTimeline(run=f"r{place}", label="pp2", timeline=one, unit="s, estimated" if place else "")
        for place, one in enumerate(timelines)
    ]
    figure = pipeline_timelines(pipelines)
    assert [sum(map(len, pipeline.timeline.events)) for pipeline in pipelines] == [8, 16]
    assert [axis.get_xlabel() for axis in figure.axes] == ["time (forward passes of a stage)", "time (s, estimated)"]
    assert [axis.get_xlim()[1] for axis in figure.axes] == [timeline.duration for timeline in timelines]
    assert {mark.runs for mark in figure.marks.values()} == {("r0",), ("r1",)}
    assert "idle 33.3 % of all ranks' time" in figure.axes[0].get_title(loc="left")


def test_each_row_of_a_panel_tells_its_run_and_what_its_rank_keeps():
    pipelines = [
        PipelineTimeline(run="a", label="pp2", timeline=timeline(4)),
        PipelineTimeline(run="b", label="pp3", timeline=timeline(4, ranks=3)),
    ]
    marks = pipeline_timelines(pipelines).marks.values()
    assert [(mark.runs, mark.text) for mark in marks] == [
        (("a",), "pp2: rank 0 keeps 2 microbatches at most"),
        (("a",), "pp2: rank 1 keeps 1 microbatch at most"),
        (("b",), "pp3: rank 0 keeps 3 microbatches at most"),
        (("b",), "pp3: rank 1 keeps 2 microbatches at most"),
        (("b",), "pp3: rank 2 keeps 1 microbatch at most"),
    ]
    assert {mark.columns for mark in marks} == {TIMELINE_COLUMNS}


def test_a_long_label_is_shortened_and_is_no_formula():
    figure = pipeline_timelines([PipelineTimeline(run="a", label="$x$ " + "long " * 30, timeline=timeline(2))])
    title = figure.axes[0].get_title(loc="left")
    assert title.startswith(r"\$x\$ long")
    assert title.endswith(" · idle 33.3 % of all ranks' time")
    assert len(title) <= 60 + len(r"\\ · idle 33.3 % of all ranks' time")
    # The mark has all of it.
    assert "long " * 29 in next(iter(figure.marks.values())).text


def test_a_panel_is_as_high_as_its_ranks_are_many():
    """Six ranks have three times the height of two, in a figure that has room for both."""
    pipelines = [PipelineTimeline(run=str(ranks), label="pp", timeline=timeline(2, ranks=ranks)) for ranks in (2, 6)]
    figure = pipeline_timelines(pipelines)
    assert list(figure.axes[0].get_gridspec().get_height_ratios()) == [2, 6]
    alone = pipeline_timelines(pipelines[:1])
    assert figure.get_figheight() > alone.get_figheight() + 6 * 0.3


def test_the_colours_are_explained_once():
    figure = pipeline_timelines([PipelineTimeline(run="a", label="pp2", timeline=timeline(2))] * 2)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()][:2] == ["F: forward", "B: backward"]
