"""Timelines as text and as a figure: what is drawn where, and what is refused."""

from __future__ import annotations

import re

import pytest
from matplotlib.figure import Figure

from tests.schedule.conftest import Schedule, orders
from titanlab.errors import ConfigError
from titanlab.techniques.schedule.action import Kind, simulate
from titanlab.techniques.schedule.plot import LIMIT, draw, draw_legend, draw_panel, rows

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def timeline_of(kind, ranks, microbatches):
    schedule = Schedule(kind)
    return simulate(schedule.actions(ranks, microbatches), schedule.placement(ranks))


@pytest.mark.parametrize("coloured", [True, False])
@pytest.mark.parametrize("width", [12, 40, 80, 200])
@pytest.mark.parametrize(("kind", "ranks", "microbatches"), [("1f1b", 4, 8), ("zbv", 12, 40), ("gpipe", 1, 1)])
def test_a_timeline_fits_its_width(kind, ranks, microbatches, width, coloured):
    lines = rows(timeline_of(kind, ranks, microbatches), width=width, coloured=coloured)
    grid = [ESCAPE.sub("", line) for line in lines if line.startswith("rank")]
    assert all(len(line) <= max(width, 20) for line in grid)
    assert len(grid) % ranks == 0
    assert coloured == any(ESCAPE.search(line) for line in lines)


def test_where_it_is_narrow_colours_say_the_kind():
    narrow = rows(timeline_of("1f1b", 2, 12), width=50, coloured=True)
    assert ESCAPE.sub("", narrow[0]) == "rank 0 01  B02B13B24B35B46B57B68B79B80B9110 11"


def test_a_long_timeline_is_wrapped_into_blocks():
    """The rest of an action that is cut has its label again."""
    lines = rows(timeline_of("1f1b", 2, 3), width=19, coloured=False)
    assert lines == [
        *["rank 0 F0F1....B0--", "rank 1 ..F0B0--F1B1", ""],
        *["rank 0 F2B1--..B2--", "rank 1 B1F2B2--....", ""],
        "F forward, B backward",
    ]


def test_in_a_block_of_blocks_a_column_is_more_time():
    lines = rows(timeline_of("gpipe", 1, 200), width=17, coloured=False)
    grid = [line for line in lines if line.startswith("rank")]
    # 600 units of two or more columns each would be 180 blocks.
    assert len(grid) == 20
    assert all(len(line) == 17 for line in grid)


def test_colours_are_those_of_kinds_and_of_a_ranks_later_stages():
    lines = rows(timeline_of("zbv", 1, 1), width=None, coloured=True)
    colours = re.findall(r"48;5;(\d+)m(\w+)", lines[0])
    assert colours == [("117", "F0"), ("68", "f0"), ("37", "i0"), ("172", "w0"), ("123", "I0"), ("222", "W0")]
    assert ESCAPE.sub("", lines[2]) == " F  forward   I  gradient of input   W  gradient of weights"
    assert lines[3] == "darker and small letters: not the rank's first stage"


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
