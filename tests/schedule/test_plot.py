"""Timelines as a figure: what is drawn where, and what is refused."""

from __future__ import annotations

import re

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from tests.schedule.conftest import Schedule, orders
from titanlab.errors import ConfigError
from titanlab.techniques.schedule.action import Kind
from titanlab.techniques.schedule.plot import LIMIT, draw, draw_legend, draw_panel, figure_size
from titanlab.techniques.schedule.timeline import simulate


def timeline_of(kind, ranks, microbatches):
    schedule = Schedule(kind)
    return simulate(schedule.actions(ranks, microbatches), schedule.placement(ranks))


def panel(timeline, *, longest=None, width=10.0):
    """The axes of a drawn timeline, and the boxes behind its rows."""
    axis = Figure().subplots()
    boxes = draw_panel(axis, "a title", timeline, longest=longest or timeline.duration, width=width)
    return axis, boxes


def corners(box):
    return (box.get_x(), box.get_y(), box.get_width(), round(box.get_height(), 9))


def test_an_action_is_a_box_from_its_begin_to_its_end_in_its_ranks_row():
    axis, boxes = panel(simulate(orders("0F0 0B0", "1F0 1B0"), [0, 1]))
    assert [corners(box) for box in boxes] == [(0, -0.4, 6, 0.8), (0, 0.6, 6, 0.8)]
    drawn = [corners(box) for box in axis.patches if box not in boxes]
    assert drawn == [(0, -0.4, 1, 0.8), (4, -0.4, 2, 0.8), (1, 0.6, 1, 0.8), (2, 0.6, 2, 0.8)]
    assert [text.get_text() for text in axis.texts] == ["F0", "B0", "F0", "B0"]
    assert [text.get_position() for text in axis.texts] == [(0.5, 0), (5, 0), (1.5, 1), (3, 1)]
    assert (axis.get_xlim(), axis.get_ylim()) == ((0, 6), (1.5, -0.5))
    assert axis.get_title(loc="left") == "a title"


def test_a_row_says_how_much_its_rank_keeps():
    axis, _ = panel(timeline_of("1f1b", 3, 8))
    assert [label.get_text() for label in axis.get_yticklabels()] == [
        *["rank 0 (keeps 3)", "rank 1 (keeps 2)", "rank 2 (keeps 1)"]
    ]


def test_all_panels_have_the_same_scale():
    axis, boxes = panel(simulate(orders("0F0 0B0"), [0]), longest=20.0)
    assert axis.get_xlim() == (0, 20)
    # Only the timeline itself is idle or busy.
    assert [corners(box) for box in boxes] == [(0, -0.4, 3, 0.8)]


def test_a_ranks_later_stages_are_darker():
    axis, boxes = panel(simulate(orders("0F0 1F0 2F0 2B0 1B0 0B0"), [0, 0, 0]))
    colours = [to_hex(box.get_facecolor()) for box in axis.patches if box not in boxes]
    assert [colours[place] for place in (0, 2, 3, 5)] == ["#a9cdee", "#4a90d0", "#57a84f", "#b5dfae"]
    assert len(set(colours)) == 6


def test_in_narrow_cells_is_the_microbatch_alone_and_in_narrower_ones_nothing():
    timeline = timeline_of("gpipe", 1, 12)

    def texts(width):
        return [text.get_text() for text in panel(timeline, width=width)[0].texts]

    assert texts(20.0)[:2] + texts(20.0)[-2:] == ["F0", "F1", "B10", "B11"]
    # The forward passes have half the room of the backward passes.
    assert texts(1.6 + 36 * 0.1)[:2] + texts(1.6 + 36 * 0.1)[-2:] == ["0", "1", "B10", "B11"]
    assert texts(1.6 + 36 * 0.05) == [str(number) for number in range(12)]
    assert texts(1.7) == []


@pytest.mark.parametrize(
    ("timelines", "size"),
    [
        ([("1f1b", 2, 3)], (8.0, 2 * 0.34 + 0.75 + 0.7)),
        ([("1f1b", 4, 64)], (1.6 + 0.24 * 201, 4 * 0.34 + 0.75 + 0.7)),
        ([("1f1b", 2, 3), ("gpipe", 4, 2)], (8.0, 6 * 0.34 + 2 * 0.75 + 0.7)),
    ],
)
def test_a_figure_grows_with_its_rows_and_its_time(timelines, size):
    width, height = figure_size([timeline_of(*given) for given in timelines])
    assert (width, height) == (pytest.approx(min(40.0, size[0])), pytest.approx(size[1]))


def test_the_legend_explains_what_is_there():
    def labels(*timelines):
        figure = Figure()
        draw_legend(figure, timelines)
        return [text.get_text() for text in figure.legends[0].get_texts()]

    assert labels(timeline_of("gpipe", 2, 2)) == [
        *["F: forward", "B: backward", "idle", "keeps: most microbatches in flight"]
    ]
    assert labels(timeline_of("gpipe", 2, 2), timeline_of("zbv", 2, 2)) == [
        *["F: forward", "B: backward", "I: gradient of input", "W: gradient of weights", "idle"],
        *["darker: the rank's later stages", "keeps: most microbatches in flight"],
    ]


def test_a_figure_has_a_panel_for_each_timeline(tmp_path):
    path = tmp_path / "order.SVG"
    draw([("first one", timeline_of("gpipe", 1, 1)), ("second one", timeline_of("1f1b", 2, 1))], path)
    text = path.read_text()
    assert "<!-- first one -->" in text
    assert "<!-- second one -->" in text
    assert "<dc:date>" not in text


def test_a_figure_of_too_many_cells_is_refused(tmp_path):
    timeline = simulate(orders("0F0 0B0"), [0], dict.fromkeys(Kind, 1.0))
    panels = [("one", timeline)] * (LIMIT // 2 + 1)
    with pytest.raises(ConfigError, match="would have 10002 cells, and 10000 can be seen; try fewer --ranks"):
        draw(panels, tmp_path / "x.svg")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("x.bmp", "is drawn as PNG, SVG or PDF; try .*x.svg"),
        ("x", "is drawn as PNG, SVG or PDF; try .*x.svg"),
        ("none/x.svg", "there is no such folder; make it, or name another"),
        ("folder.svg", "cannot be written: Is a directory; name another file"),
    ],
)
def test_a_place_that_takes_no_figure_is_told(tmp_path, name, told):
    (tmp_path / "folder.svg").mkdir()
    with pytest.raises(ConfigError, match=f"^--plot={re.escape(str(tmp_path / name))}: {told}"):
        draw([("one", simulate(orders("0F0 0B0"), [0]))], tmp_path / name)
