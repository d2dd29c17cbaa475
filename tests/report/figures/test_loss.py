"""Training loss against tokens: which rows are drawn, and what the lines are called."""

import math

import pytest

from titanlab.costs import meter
from titanlab.report import figures
from titanlab.report.figures.over_time import loss_by_tokens, thinned
from titanlab.report.figures.style import MOST_LINES
from titanlab.report.frames import metrics_frame


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
    ("count", "most", "kept"),
    [
        (0, 3, []),
        (1, 3, [0]),
        (3, 3, [0, 1, 2]),
        (4, 3, [0, 2, 3]),
        (101, 3, [0, 50, 100]),
        (101, 2, [0, 100]),
    ],
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


def test_a_run_without_a_loss_has_a_mark_all_the_same():
    figure = loss_by_tokens(steps_of("a", math.nan))
    ((mark),) = figure.marks.values()
    assert (mark.runs, mark.text) == (("a",), "a (dp_s2): no loss")


def test_a_row_that_does_not_say_its_tokens_is_at_the_beginning():
    rows = steps_of("a", 5.0, **{meter.TOKENS_SEEN: None})
    assert list(loss_by_tokens(rows).axes[0].lines[0].get_xdata()) == [0]


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
