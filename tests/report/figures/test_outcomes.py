"""How the runs of each recipe ended."""

import pytest

from tests.report.figures.drawn import bars, texts
from tests.sweep.table.plain import row
from titanlab.report import figures
from titanlab.report.figures.bars import outcomes
from titanlab.report.frames import sweep_frame


def test_outcomes(mixed):
    figure = figures.outcomes(sweep_frame(mixed.folder.path))
    axis = figure.axes[0]
    labels = [label.get_text() for label in axis.get_yticklabels()]
    assert labels == ["dp_s2", "single", "tp2", "cp2", "(dropped: rule)", "(dropped: where)"]
    told = [text.get_text() for text in figure.legends[0].get_texts()]
    assert told == ["done (4)", "oom (1)", "running (1)", "dropped (2)"]
    lengths = {}
    for place, length, _ in bars(figure):
        lengths[place] = lengths.get(place, 0) + length
    assert lengths == {0: 3, 1: 1, 2: 1, 3: 1, 4: 1, 5: 1}


def told(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_runs_of_nothing_are_said_to_be_none():
    figure = outcomes([])
    assert texts(figure) == ["no run"]
    assert figure.legends == []


def test_runs_without_a_folder_and_dropped_points_have_bars_of_their_own():
    rows = [
        row(),
        row(recipe=None, state="missing", outcome=None),
        row(recipe=None, state="unreadable", outcome=None),
        row(recipe=None, state="dropped", outcome="infeasible", dropped_stage="rule"),
        row(recipe=None, state="dropped", outcome=None, dropped_stage=None),
    ]
    figure = outcomes(rows)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["dp_s2", "(no folder)", "(dropped: rule)", "(dropped: None)"]
    assert told(figure) == ["done (1)", "missing (1)", "unreadable (1)", "dropped (2)"]


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


def test_of_many_recipes_the_first_are_shown_and_all_are_counted():
    figure = outcomes([row(f"l{place}") for place in range(70)])
    assert len(figure.axes[0].patches) == 60
    assert figure.axes[0].get_ylabel() == "the first 60 of 70"
    assert told(figure) == ["done (70)"]
