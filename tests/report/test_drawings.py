"""Figures of the analyses: what is drawn of empty, equal and missing values, and labels that are not formulas."""

from __future__ import annotations

import pandas as pd
import pytest

from titanlab.plan import ITEMS
from titanlab.report.analyses import ITEM
from titanlab.report.drawings import draw_bubbles, draw_differences, draw_memory, draw_scaling

SCALING = ["efficiency_percent", "oversubscribed", "speedup", "reference", "recipe", "world"]
MEMORY = ["run", "name", "estimated_gib", "measured_gib", *(f"{ITEM}{name}" for name in ITEMS)]
BUBBLES = ["schedule", "microbatches", "bubble_percent", "ranks"]
DIFFERENCES = ["run", "name", "layout.label", "step", "loss_difference", "grad_norm_difference"]
FORMULA = r"a$x^$ \frac{"


def frame(columns, *rows):
    return pd.DataFrame(list(rows), columns=columns)


def difference(name="n", value=1e-3, *, run="r", step=1):
    return (run, name, "dp_s2", step, value, None)


def legend(figure):
    """The texts of the legend; drawing the figure shows labels that matplotlib cannot read."""
    figure.draw_without_rendering()
    return [text.get_text() for found in figure.legends for text in found.get_texts()]


def title(figure):
    return figure.axes[0].get_title(loc="left")


@pytest.mark.parametrize(
    ("draw", "columns", "heading"),
    [
        (draw_scaling, SCALING, "scaling efficiency by layout"),
        (draw_memory, MEMORY, "memory by item, estimated"),
        (draw_bubbles, BUBBLES, "bubble of a pipeline"),
        (draw_differences, DIFFERENCES, "difference of the loss from the reference"),
    ],
)
def test_of_nothing_there_is_a_figure_that_says_so(draw, columns, heading):
    figure = draw(frame(columns))
    assert legend(figure) == []
    assert title(figure) == heading
    assert [text.get_text() for text in figure.axes[0].texts if text.get_text()]


def test_efficiencies_are_bars_and_oversubscribed_ones_are_hatched():
    figure = draw_scaling(frame(SCALING, (100.0, False, 1.0, "a", "a", 1), (50.0, True, 2.0, "a", FORMULA, 4)))
    assert len(legend(figure)) == 1
    bars = figure.axes[0].patches
    assert [(bar.get_width(), bool(bar.get_hatch())) for bar in bars] == [(100.0, False), (50.0, True)]
    assert figure.axes[0].texts[0].get_text() == "the reference"
    assert figure.axes[0].texts[1].get_text() == "50%  (2.00 times as fast as a)"


@pytest.mark.parametrize("measured", [8.0, None])
def test_items_of_memory_are_stacked_up_to_the_estimate(measured):
    items = [0.0, *range(1, len(ITEMS))]
    figure = draw_memory(frame(MEMORY, ("r", "a", 50.0, measured, *items)))
    # An item that no run has is left out.
    assert len(legend(figure)) == len(ITEMS) - 1 + len(("rest", "measured"))
    assert sum(bar.get_width() for bar in figure.axes[0].patches) == pytest.approx(50.0)


def test_each_schedule_has_a_line_in_the_order_of_microbatches():
    rows = [("1f1b", 8, 5.0, 4), ("1f1b", 4, 10.0, 4), ("_mine", 4, 12.0, 4)]
    figure = draw_bubbles(frame(BUBBLES, *rows))
    assert [label.strip() for label in legend(figure)] == ["1f1b", "_mine"]
    assert title(figure) == "bubble of a pipeline of 4 ranks"
    line = figure.axes[0].lines[0]
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([4, 8], [10.0, 5.0])


@pytest.mark.parametrize("value", [0.0, None])
@pytest.mark.parametrize("tolerance", [None, 1e-3, 0.0])
def test_equal_and_missing_values_are_not_drawn(value, tolerance):
    figure = draw_differences(frame(DIFFERENCES, difference(value=value)), tolerance=tolerance)
    assert legend(figure) == ["n (dp_s2)"]
    assert list(figure.axes[0].lines[0].get_xdata()) == []


def test_the_tolerance_is_in_sight():
    for rows in ([], [difference(value=0.0)], [difference(value=1e-2)]):
        figure = draw_differences(frame(DIFFERENCES, *rows), tolerance=1e-3)
        legend(figure)
        low, high = figure.axes[0].get_ylim()
        assert low < 1e-3 < high


def test_more_runs_than_lines_are_counted():
    figure = draw_differences(frame(DIFFERENCES, *(difference(run=f"r{place}") for place in range(20))))
    assert len(legend(figure)) == 14
    assert figure.legends[0].get_title().get_text() == "… and 6 more"


def test_the_gradient_norm_has_its_own_column():
    rows = [("r", "n", "l", 1, 0.5, 0.25)]
    figure = draw_differences(frame(DIFFERENCES, *rows), column="grad_norm_difference")
    assert list(figure.axes[0].lines[0].get_ydata()) == [0.25]
    assert title(figure) == "difference of the gradient norm from the reference"
