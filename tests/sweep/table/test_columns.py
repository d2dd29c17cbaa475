"""Columns of a sweep's table: those of the page, the values that they take, and the point's."""

from pathlib import Path

import pytest

from titanlab.sweep import as_text, fitting_value, point_keys
from titanlab.sweep.columns import COLUMNS

PAGE = (Path(__file__).parents[3] / "docs" / "comparing.md").read_text()


def test_the_page_has_every_column_and_no_other():
    section = PAGE.split("\n## Columns\n")[1].split("\n## ")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines()]
    told = {cells[0]: cells[1] for cells in lines if len(cells) == 3 and cells[0].startswith("`")}
    expected = {f"`{name}`": kind for name, kind in COLUMNS.items()}
    assert told == {**expected, "`point.KEY`": "text"}
    assert all(cells[2] for cells in lines if len(cells) == 3 and cells[0].startswith("`"))


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("cause", "boom", "boom"),
        ("cause", 3, None),
        ("cause", None, None),
        # The columns of a point are text.
        ("point.seed", "3", "3"),
        ("point.seed", 3, None),
        ("stale", False, False),
        ("stale", 1, None),
        ("stale", "yes", None),
        ("step", 0, 0),
        ("step", True, None),
        ("step", 3.0, None),
        ("step", 2**63 - 1, 2**63 - 1),
        ("step", 2**63, None),
        ("step", -(2**63), None),
        ("loss", 4.25, 4.25),
        ("loss", 4, 4.0),
        ("loss", True, None),
        ("loss", "4", None),
        ("loss", [4.0], None),
    ],
)
def test_a_value_of_another_kind_than_its_column_is_none(name, value, expected):
    found = fitting_value(name, value)
    assert (found, type(found)) == (expected, type(expected))


def test_a_whole_number_in_a_column_of_numbers_is_one_that_a_float_holds():
    """Parquet takes no whole number above 2**53 as a number: `titanlab collect` ended with a traceback."""
    found = fitting_value("flops_per_token", 2**60 + 1)
    assert (found, type(found)) == (float(2**60), float)
    assert fitting_value("flops_per_token", 10**400) is None


def test_text_that_no_file_holds_is_taken_as_far_as_it_goes():
    """Half a pair of UTF-16, as a damaged JSON file has it: `titanlab collect` ended with a traceback."""
    assert fitting_value("cause", "a\ud800b") == "a?b"


def test_the_point_has_the_columns_of_the_first_row():
    assert point_keys([{"run": "a", "point.seed": "1", "pointless": 2, "point.a.b": "x"}]) == [
        "point.seed",
        "point.a.b",
    ]
    assert point_keys([]) == []


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (False, "false"),
        (0.001, "0.001"),
        ("fsdp_tp", "fsdp_tp"),
        ([0.9, None, [True]], "[0.9, null, [true]]"),
        ((1, 2), "[1, 2]"),
        ([], "[]"),
    ],
)
def test_a_value_of_a_point_is_shown_as_one_types_it(value, text):
    assert as_text(value) == text
