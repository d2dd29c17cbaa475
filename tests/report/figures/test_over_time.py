"""What changes during a run: losses against tokens, loads of experts, timelines of pipelines."""

import math
from xml.etree import ElementTree

import pytest

from titanlab.costs import meter
from titanlab.report import figures
from titanlab.report.figures import svg
from titanlab.report.figures.over_time import (
    ExpertLoad,
    PipelineTimeline,
    expert_load,
    loss_by_tokens,
    pipeline_timelines,
    thinned,
)
from titanlab.report.figures.style import MOST_LINES
from titanlab.report.frames import metrics_frame
from titanlab.techniques.schedule.action import simulate
from titanlab.techniques.schedule.published_schema import OneFOneB


def test_loss(mixed):
    figure = figures.loss_by_tokens(metrics_frame(mixed.folder.path))
    lines = figure.axes[0].lines
    assert [list(line.get_ydata()) for line in lines] == [[5.0, 4.0, 3.0]] * 4 + [[5.0, 4.5]]
    assert list(lines[0].get_xdata()) == [384, 768, 1152]
    # Curves that lie on each other are told by their widths.
    widths = [line.get_linewidth() for line in lines]
    assert widths == sorted(set(widths), reverse=True)
    assert figure.axes[0].get_xlabel() == "tokens trained on"
    assert figure.axes[0].get_ylabel() == "loss (nats per token)"


def steps_of(run, *losses, **given):
    plain = {"run": run, "name": run, "layout.label": "dp_s2"}
    return [
        {**plain, "step": step, meter.LOSS: loss, meter.TOKENS_SEEN: 10 * step, **given}
        for step, loss in enumerate(losses, 1)
    ]


@pytest.mark.parametrize(
    ("count", "most", "kept"), [(0, 3, []), (3, 3, [0, 1, 2]), (4, 3, [0, 2, 3]), (101, 2, [0, 100])]
)
def test_few_rows_are_left_of_many_with_the_first_and_the_last(count, most, kept):
    rows = [{"step": step} for step in range(count)]
    assert [each["step"] for each in thinned(rows, most)] == kept
    assert len(thinned([{"step": step} for step in range(100_000)])) == 400


def test_losses_that_are_none_are_left_out_and_steps_are_put_in_order():
    rows = steps_of("a", 5.0, math.nan, math.inf, None, "4", True, 3.0)
    (line,) = loss_by_tokens(rows[::-1]).axes[0].lines
    assert list(line.get_ydata()) == [5.0, 3.0]
    assert list(line.get_xdata()) == [10, 70]
    # A row that does not say its tokens is at the beginning; a run without a loss has a mark all the same.
    assert list(loss_by_tokens(steps_of("a", 5.0, **{meter.TOKENS_SEEN: None})).axes[0].lines[0].get_xdata()) == [0]
    (mark,) = loss_by_tokens(steps_of("a", math.nan)).marks.values()
    assert (mark.runs, mark.text) == (("a",), "a (dp_s2): no loss")


def test_lines_have_the_labels_that_are_given():
    rows = [*steps_of("a", 5.0, 4.0), *steps_of("b", 3.25)]
    figure = loss_by_tokens(rows, labels={"a": "first", "b": "x" * 50})
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["first", "x" * 22 + "…" + "x" * 11]
    assert [mark.text for mark in figure.marks.values()] == [
        "first, last 4.0000 at step 2",
        "x" * 50 + ", last 3.2500 at step 1",
    ]
    assert {mark.columns for mark in figure.marks.values()} == {(meter.LOSS, meter.TOKENS_SEEN)}


@pytest.mark.parametrize(("count", "title"), [(MOST_LINES, ""), (MOST_LINES + 1, "… and 1 more")])
def test_lines_that_have_no_label_are_counted(count, title):
    figure = loss_by_tokens([step for place in range(count) for step in steps_of(f"r{place}", 5.0)])
    assert len(figure.axes[0].lines) == count
    assert len(figure.legends[0].get_texts()) == MOST_LINES
    assert figure.legends[0].get_title().get_text() == title
    # No line is thinner than a line.
    assert min(line.get_linewidth() for line in figure.axes[0].lines) == 1.4


def test_a_large_model_is_a_small_figure(tmp_path):
    """94 blocks of 128 experts, as those of the largest Qwen3, are one picture and not 12,032 boxes."""
    counts = [[(7 * block + expert) % 50 for expert in range(128)] for block in range(94)]
    figure = expert_load([ExpertLoad(runs=["r"], label="r", step=10, steps=5, counts=counts)])
    svg.save(figure, tmp_path / "experts.svg")
    assert (tmp_path / "experts.svg").stat().st_size < 150_000
    assert ElementTree.parse(tmp_path / "experts.svg").getroot().tag.endswith("svg")


def timeline(microbatches, ranks=2):
    schedule = OneFOneB()
    return simulate(schedule.actions(ranks=ranks, microbatches=microbatches), schedule.placement(ranks=ranks))


def test_a_panel_for_each_pipeline():
    timelines = [timeline(count) for count in (2, 4)]
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


def test_a_long_label_is_shortened_and_is_no_formula():
    figure = pipeline_timelines([PipelineTimeline(run="a", label="$x$ " + "long " * 30, timeline=timeline(2))])
    title = figure.axes[0].get_title(loc="left")
    assert title.startswith(r"\$x\$ long")
    assert title.endswith(" · idle 33.3 % of all ranks' time")
    assert len(title) <= 60 + len(r"\\ · idle 33.3 % of all ranks' time")
    # The mark has all of it.
    assert "long " * 29 in next(iter(figure.marks.values())).text
