"""Throughput and memory of recipes as bars."""

import pytest

from tests.report.figures.drawn import bars, texts
from tests.sweep.table.plain import row
from titanlab.report import figures
from titanlab.report.figures.bars import memory_by_layout, throughput_by_layout
from titanlab.report.frames import sweep_frame


def test_throughput(mixed):
    runs = sweep_frame(mixed.folder.path)
    figure = figures.throughput_by_layout(runs)
    assert bars(figure) == [(0, 1000.0, "////"), (1, 3000.0, None)]
    assert texts(figure) == ["1,000  (MFU 41.5%)", "3,000  (MFU 41.5%)", "oom", "running"]
    axis = figure.axes[0]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["dp_s2", "single", "tp2", "cp2"]
    assert axis.get_xlabel() == "tokens per second of one device, median step after warm-up"
    # The three runs of the first recipe are to be seen, too.
    assert [list(line.get_xdata()) for line in axis.lines] == [[900.0], [1000.0], [1100.0]]
    (legend,) = figure.legends
    assert legend.get_texts()[0].get_text().startswith("oversubscribed")
    together = figures.throughput_by_layout(runs, together=True)
    assert [length for _, length, _ in bars(together)] == [2000.0, 3000.0]


def test_memory(mixed):
    figure = figures.memory_by_layout(sweep_frame(mixed.folder.path))
    # How many cores there were has nothing to do with it.
    assert bars(figure) == [(0, 0.75, None), (1, 0.75, None)]
    assert "GiB" in figure.axes[0].get_xlabel()
    assert figure.legends == []


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


def test_a_centre_that_is_given_goes_before_the_median_and_moves_its_place():
    rows = [run("a", "tp2", 10.0), run("b", "cp2", 20.0), run("c", "tp2", 5.0, control=True)]
    figure = throughput_by_layout(rows, ranked=True, centres={"tp2": 40.0})
    # The control may have the label of another recipe: the centre is not its own.
    assert labels(figure) == ["tp2", "cp2", "tp2 (control)"]
    assert lengths(figure) == [40.0, 20.0, 5.0]


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
        "dp_s2: 15  (MFU 40.0%), 2 runs",
        "a: 10.00",
        "b: 20.00",
        "tp2: oom, queued",
    ]


@pytest.mark.parametrize(
    ("bands", "drawn"),
    [(None, 0), ({}, 0), ({"dp_s2": (5.0, 25.0)}, 1), ({"other": (5.0, 25.0)}, 0)],
)
def test_an_interval_is_a_line_with_ends(bands, drawn):
    figure = throughput_by_layout([run("a", speed=10.0), run("b", speed=20.0)], bands=bands)
    assert len(figure.axes[0].containers) - 1 == drawn
    # The text stands behind the longest of all.
    (text,) = [text for text in figure.axes[0].texts if "MFU" in text.get_text()]
    assert text.get_position()[0] > (25.0 if drawn else 20.0)


def test_speeds_of_all_devices_have_no_mfu():
    figure = throughput_by_layout([run("a", tokens_per_second_all=2345.6)], together=True)
    assert texts(figure) == ["2,346"]
    assert "all devices" in figure.axes[0].get_xlabel()


@pytest.mark.parametrize(
    ("accelerators", "words"),
    [(["cuda"], "reserved by the allocator"), (["cpu"], "resident memory"), (["cuda", "cpu"], "resident memory")],
)
def test_memory_says_what_was_measured(accelerators, words):
    rows = [{**run(f"r{place}", f"l{place}"), "accelerator": kind} for place, kind in enumerate(accelerators)]
    assert words in memory_by_layout(rows).axes[0].get_xlabel()


def test_a_bar_of_nothing_is_drawn():
    assert lengths(memory_by_layout([run("a", memory_gib=0.0)])) == [0.0]
