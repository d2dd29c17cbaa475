"""Timelines as text."""

from __future__ import annotations

import re

import pytest

from tests.schedule.conftest import Schedule, orders
from titanlab.techniques.schedule.action import Kind
from titanlab.techniques.schedule.plot import rows
from titanlab.techniques.schedule.timeline import simulate

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def timeline_of(kind, ranks, microbatches):
    schedule = Schedule(kind)
    return simulate(schedule.actions(ranks, microbatches), schedule.placement(ranks))


@pytest.mark.parametrize("coloured", [True, False])
@pytest.mark.parametrize("width", [12, 40, 80, 200])
@pytest.mark.parametrize(("kind", "ranks", "microbatches"), [("1f1b", 4, 8), ("zbv", 12, 40), ("gpipe", 1, 1)])
def test_a_timeline_fits_its_width(kind, ranks, microbatches, width, coloured):
    schedule = Schedule(kind)
    timeline = simulate(schedule.actions(ranks, microbatches), schedule.placement(ranks))
    lines = rows(timeline, width=width, coloured=coloured)
    grid = [ESCAPE.sub("", line) for line in lines if line.startswith("rank")]
    assert all(len(line) <= max(width, 20) for line in grid)
    assert len(grid) % ranks == 0
    assert coloured == any(ESCAPE.search(line) for line in lines)


def test_where_it_is_narrow_colours_say_the_kind():
    schedule = Schedule("1f1b")
    timeline = simulate(schedule.actions(2, 12), schedule.placement(2))
    narrow = rows(timeline, width=50, coloured=True)
    assert ESCAPE.sub("", narrow[0]) == "rank 0 01  B02B13B24B35B46B57B68B79B80B9110 11"


def test_a_row_for_each_rank_and_a_legend():
    assert rows(timeline_of("1f1b", 2, 3), width=None, coloured=False) == [
        "rank 0 F0F1....B0--F2B1--..B2--",
        "rank 1 ..F0B0--F1B1--F2B2--....",
        "",
        "F forward, B backward",
    ]


def test_the_numbers_of_many_ranks_are_in_one_column():
    lines = rows(timeline_of("gpipe", 11, 1), width=None, coloured=False)
    assert [line[:8] for line in lines[:11:10]] == ["rank 0  ", "rank 10 "]
    assert {len(line) for line in lines[:11]} == {8 + 2 * 33}


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


def test_a_cell_is_as_wide_as_its_action_is_long():
    durations = {Kind.FORWARD: 1.0, Kind.BACKWARD: 3.0}
    timeline = simulate(orders("0F0 0B0"), [0], durations)
    assert rows(timeline, width=None, coloured=False)[0] == "rank 0 F0B0----"


def test_actions_of_no_duration_are_not_shown():
    timeline = simulate(orders("0F0 0I0 0W0"), [0], {Kind.FORWARD: 1.0, Kind.INPUT: 0.0, Kind.WEIGHT: 1.0})
    assert rows(timeline, width=None, coloured=False)[0] == "rank 0 F0W0"


def test_a_timeline_without_actions_is_a_row_without_cells():
    assert rows(simulate([[]], [0]), width=80, coloured=False) == ["rank 0 ", "", ""]
