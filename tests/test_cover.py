"""The covering rows of the matrices hold every pair of options of the whole matrices, and every axis with every technique."""

from itertools import product

import pytest

from tests.cover import cover, marks, pairs
from tests.prove import parity_rows, technique_rows
from titanlab.costs import AXES


def test_a_cover_holds_every_pair_and_takes_what_is_cheap():
    rows = ["ab", "bc", "abc", "ac", "d"]
    assert cover(rows, list, always=[], cost=lambda row: 1) == ["abc", "d"]
    assert cover(rows, list, always=["ab"], cost=lambda row: 9 if row == "abc" else 1) == ["bc", "ac", "d"]
    assert cover(rows, list, always=["abc", "d"], cost=lambda row: 1) == []


def test_a_row_is_in_one_layer():
    layers = [[mark.name for mark in marks(row, always="a", covering="b")] for row in "abc"]
    assert layers == [[], ["full", "covering"], ["full"]]


def shown(rows):
    return set().union(*(pairs(row.options()) for row in rows))


@pytest.mark.parametrize(
    ("rows", "covering"),
    [
        (parity_rows.ROWS, [*parity_rows.ALWAYS, *parity_rows.COVERING]),
        (technique_rows.ROWS, technique_rows.COVERING),
    ],
)
def test_covering_rows_hold_every_pair_of_the_matrix(rows, covering):
    left = shown(rows) - shown(covering)
    assert all(pair in BY_TURNS for pair in left)
    assert len(set(covering)) == len(covering) < len(rows)


AXIS_NAMES = list(AXES)
SCHEDULES = [f"schedule={name}" for name in ("1f1b", *parity_rows.SCHEDULES)]
TECHNIQUES = sorted(
    {
        option
        for row in technique_rows.ROWS
        for option in row.options()
        if option.startswith(("precision=", "ac=", "compile="))
    }
)
# What the matrix of layouts uses.
PLAIN = ["precision=fp32", "ac=none", "compile="]
# A row that generates code takes longer than all the rest of it, and its graphs are those that aot_eager traces: CI runs
# one of 24 parts of these rows each time.
BY_TURNS = {frozenset(pair) for pair in product(["compile=inductor"], SCHEDULES)}


def test_every_pair_of_axis_technique_and_schedule_is_in_the_covering_rows():
    layouts = [*parity_rows.ALWAYS, *parity_rows.COVERING]
    held = shown(technique_rows.COVERING)
    held = held.union(*(pairs([*row.options(), *PLAIN]) for row in layouts))
    assert len(TECHNIQUES) == 7 + 5 + 3
    assert len(SCHEDULES) == 8
    wanted = {
        frozenset(pair)
        for one, other in (
            (AXIS_NAMES, AXIS_NAMES),
            (AXIS_NAMES, TECHNIQUES),
            (AXIS_NAMES, SCHEDULES),
            (TECHNIQUES, SCHEDULES),
        )
        for pair in product(one, other)
    }
    assert wanted - held <= BY_TURNS
    assert wanted <= held | shown(technique_rows.ROWS)
