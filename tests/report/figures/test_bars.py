"""A bar for each recipe: throughput, memory, outcomes of its runs, and the parts of its step."""

import pytest
from matplotlib.colors import to_hex

from tests.sweep.table.plain import row
from titanlab.costs.meter import LOSS, TOKENS_SEEN
from titanlab.report import figures
from titanlab.report.figures.bars import StackedBar, memory_by_layout, outcomes, step_time_split, throughput_by_layout
from titanlab.report.figures.over_time import loss_by_tokens
from titanlab.report.figures.scatter import pareto, points_of
from titanlab.report.figures.style import recipe_colours
from titanlab.report.frames import sweep_frame
from titanlab.sweep import rank


def bars(figure):
    """Lengths of the bars, from top to bottom, and which are hatched."""
    axis = figure.axes[0]
    return [(round(patch.get_y() + 0.36), patch.get_width(), patch.get_hatch()) for patch in axis.patches]


def texts(figure):
    """Texts in the axes."""
    return [text.get_text() for text in figure.axes[0].texts]


def test_throughput(mixed):
    runs = sweep_frame(mixed.folder.path)
    figure = figures.throughput_by_layout(runs)
    # The geometric means, as in a ranking.
    assert lengths(figure) == pytest.approx([(900 * 1000 * 1100) ** (1 / 3), 3000.0])
    assert [hatch for _, _, hatch in bars(figure)] == ["////", None]
    assert texts(figure) == ["997, 1,993 together  (MFU 41.5%)", "3,000  (MFU 41.5%)", "oom", "running"]
    axis = figure.axes[0]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["dp_s2", "single", "tp2", "cp2"]
    assert axis.get_xlabel() == "tokens per second of one device, median step after warm-up"
    # The three runs of the first recipe are to be seen, too.
    assert [list(line.get_xdata()) for line in axis.lines] == [[900.0], [1000.0], [1100.0]]
    (legend,) = figure.legends
    assert legend.get_texts()[0].get_text().startswith("oversubscribed")
    together = figures.throughput_by_layout(runs, together=True)
    assert lengths(together) == pytest.approx([2 * (900 * 1000 * 1100) ** (1 / 3), 3000.0])
    assert texts(together)[:2] == ["1,993", "3,000"]
    assert "all devices" in together.axes[0].get_xlabel()


def lengths(figure):
    return [length for _, length, _ in bars(figure)]


def labels(figure):
    return [label.get_text() for label in figure.axes[0].get_yticklabels()]


def run(name, recipe="dp_s2", speed=1000.0, **given):
    return row(recipe, speed, run=name, accelerator="cpu", **given)


def test_bars_are_in_the_order_of_the_sweep_or_of_the_speeds():
    rows = [run("a", "slow", 10.0), run("b", "crowded", 99.0, oversubscribed=True), run("c", "none", None)]
    rows += [run("d", "fast", 30.0)]
    assert labels(throughput_by_layout(rows)) == ["slow", "crowded", "none", "fast"]
    # What says nothing comes last.
    assert labels(throughput_by_layout(rows, ranked=True)) == ["fast", "slow", "none", "crowded"]


def test_a_bar_is_the_figure_of_the_ranking():
    """One recipe had 1,170 tokens/s in one figure, the median, and 730 in the next, the geometric mean."""
    rows = [run("a", "tp2", 100.0), run("b", "tp2", 400.0), run("c", "cp2", 220.0), run("d", "tp2", 5.0, control=True)]
    figure = throughput_by_layout(rows, ranked=True)
    assert labels(figure) == ["cp2", "tp2", "tp2 (control)"]
    assert lengths(figure) == pytest.approx([220.0, 200.0, 5.0])
    assert {entry.label: entry.centre for entry in rank(rows).ranked} == pytest.approx({"cp2": 220.0, "tp2": 200.0})
    (of_tp2,) = [point for point in points_of(rows, "tokens_per_second") if "control" not in point.group.label][:1]
    assert of_tp2.speed == pytest.approx(200.0)


def test_a_row_whose_number_of_processes_is_damaged_is_drawn():
    rows = [run("a", "tp2", 100.0, world=None, tokens_per_second_all=200.0), run("b", "cp2", 50.0)]
    assert texts(throughput_by_layout(rows))[0] == "100, 200 together  (MFU 40.0%)"
    assert set(recipe_colours(rows)) == {"a", "b"}


def test_a_recipe_has_one_colour_in_all_figures():
    rows = [run("a", "tp2", 100.0), run("b", "cp2", 220.0, oversubscribed=True), run("c", "pp2", 50.0)]
    colours = recipe_colours(rows)
    assert len(set(colours.values())) == 3
    # Whatever the order of the bars.
    for ranked in (False, True):
        axis = throughput_by_layout(rows, ranked=ranked).axes[0]
        drawn = [to_hex(bar.get_edgecolor() if bar.get_hatch() else bar.get_facecolor()) for bar in axis.patches]
        order = ["a", "c", "b"] if ranked else ["a", "b", "c"]
        assert drawn == [colours[name] for name in order]
    points = {line.get_gid(): line for line in pareto(rows).axes[0].lines if line.get_gid()}
    marks = pareto(rows).marks
    shown = {
        marks[key].runs[0]: line.get_markeredgecolor() if marks[key].runs == ("b",) else line.get_color()
        for key, line in points.items()
    }
    assert shown == colours
    steps = [{"run": name, "name": name, "layout.label": "x", "step": 1, LOSS: 2.0, TOKENS_SEEN: 3} for name in "cba"]
    lines = loss_by_tokens(steps, labels={name: name for name in "abc"}, colours=colours).axes[0].lines
    assert {line.get_label(): line.get_color() for line in lines} == colours


@pytest.mark.parametrize("high", [220.0, 9_000.0, 1e12])
def test_texts_and_labels_stay_within_the_figure_beside_a_wide_interval(high):
    """From 8 % noise with two repeats on, the values stood beyond the axis, and the label of the axis was lost."""
    rows = [run("a", speed=100.0), run("b", speed=110.0), run("c", "single", 50.0, world=1)]
    figure = throughput_by_layout(rows, bands={"dp_s2": (20.0, high)})
    figure.draw_without_rendering()
    axis = figure.axes[0]
    width, height = figure.bbox.width, figure.bbox.height
    shown = [text for text in axis.texts if text.get_text()]
    assert len(shown) == 2
    for text in [*shown, axis.xaxis.label, *axis.get_yticklabels()]:
        box = text.get_window_extent()
        assert 0 <= box.x0 < box.x1 <= width + 1, text
        assert 0 <= box.y0 < box.y1 <= height + 1, text
    # The bars stay large enough to be compared.
    assert axis.get_xlim()[1] < 300.0


def test_of_many_recipes_the_first_are_shown():
    figure = throughput_by_layout([run(f"r{place}", f"l{place}") for place in range(70)])
    assert len(bars(figure)) == 60
    assert figure.axes[0].get_ylabel() == "the first 60 of 70"


def test_marks_name_the_runs_that_were_measured():
    rows = [run("a", speed=10.0), run("b", speed=20.0), run("c", outcome="oom", speed=99.0)]
    rows += [run("d", "tp2", None, outcome="oom"), run("e", "tp2", None, outcome=None, state="queued")]
    marks = list(throughput_by_layout(rows).marks.values())
    assert [(mark.runs, mark.columns) for mark in marks] == [
        (("a", "b"), ("tokens_per_second",)),
        (("a",), ("tokens_per_second",)),
        (("b",), ("tokens_per_second",)),
        (("d", "e"), ("outcome", "state")),
    ]
    assert [mark.text for mark in marks] == [
        "dp_s2: 14  (MFU 40.0%), 2 runs",
        "a: 10.00",
        "b: 20.00",
        "tp2: oom, queued",
    ]


@pytest.mark.parametrize(
    ("bands", "drawn"), [(None, 0), ({}, 0), ({"dp_s2": (5.0, 25.0)}, 1), ({"other": (5.0, 25.0)}, 0)]
)
def test_an_interval_is_a_line_with_ends(bands, drawn):
    figure = throughput_by_layout([run("a", speed=10.0), run("b", speed=20.0)], bands=bands)
    ends = [line for line in figure.axes[0].lines if line.get_marker() == "|"]
    assert len(ends) == 2 * drawn
    # The text stands behind the longest of all.
    (text,) = [text for text in figure.axes[0].texts if "MFU" in text.get_text()]
    assert text.get_position()[0] > (25.0 if drawn else 20.0)


@pytest.mark.parametrize(
    ("accelerators", "words"),
    [(["cuda"], "reserved by the allocator"), (["cpu"], "resident memory"), (["cuda", "cpu"], "resident memory")],
)
def test_memory_says_what_was_measured(accelerators, words):
    rows = [{**run(f"r{place}", f"l{place}"), "accelerator": kind} for place, kind in enumerate(accelerators)]
    assert words in memory_by_layout(rows).axes[0].get_xlabel()


def test_outcomes(mixed):
    figure = figures.outcomes(sweep_frame(mixed.folder.path))
    axis = figure.axes[0]
    labels = [label.get_text() for label in axis.get_yticklabels()]
    assert labels == ["dp_s2", "single", "tp2", "cp2", "(dropped: rule)", "(dropped: where)"]
    assert told(figure) == ["done (4)", "oom (1)", "running (1)", "dropped (2)"]
    lengths = {}
    for place, length, _ in bars(figure):
        lengths[place] = lengths.get(place, 0) + length
    assert lengths == {0: 3, 1: 1, 2: 1, 3: 1, 4: 1, 5: 1}


def told(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_ends_stand_in_their_order_beside_each_other():
    rows = [row(outcome="crash"), row(outcome="oom"), row(), row(), row(state="queued", outcome=None)]
    figure = outcomes(rows)
    assert told(figure) == ["done (2)", "oom (1)", "crash (1)", "queued (1)"]
    drawn = [(patch.get_x(), patch.get_width(), patch.get_hatch()) for patch in figure.axes[0].patches]
    assert drawn == [(0, 2, None), (2, 1, "//"), (3, 1, "xx"), (4, 1, None)]


@pytest.mark.parametrize(
    ("kind", "hatch"), [("done", None), ("hang", "\\\\"), ("node_fail", "oo"), ("cancelled", None)]
)
def test_bad_ends_differ_in_black_and_white(kind, hatch):
    ((_, length, found),) = bars(outcomes([row(outcome=kind)]))
    assert (length, found) == (1, hatch)


def test_parts_are_stacked_and_estimates_say_so():
    parts = {"forward": 0.2, "backward": 0.4, "shard": 0.1, "data": 0.0, "strange": 0.05}
    splits = [
        StackedBar(run="a", label="dp_s2", parts=parts, columns=["breakdown/forward(s)"], is_measured=True),
        StackedBar(run="b", label="tp2", parts={"compute": 0.5}, columns=["config.yaml"], is_measured=False),
    ]
    figure = step_time_split(splits)
    assert {mark.text for mark in figure.marks.values()} == {
        "dp_s2: forward 200 ms",
        "dp_s2: backward 400 ms",
        "dp_s2: exposed: shard 100 ms",
        "dp_s2: strange 50.0 ms",
        "tp2: compute 500 ms, estimated",
    }
    assert texts(figure) == ["750 ms", "500 ms (estimate)"]
    assert sum(length for place, length, _ in bars(figure) if place == 0) == sum(parts.values())
