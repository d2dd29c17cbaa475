"""Cells and tables of a report: every plain value has a text, and numbers are aligned."""

from __future__ import annotations

import math

import pytest

from titanlab.report.panels import Cell, run_cell, text, values_table


@pytest.mark.parametrize(
    ("value", "shown", "is_number"),
    [
        (None, "", False),
        (True, "yes", False),
        (False, "no", False),
        (0, "0", True),
        (12345678, "12,345,678", True),
        (999.96, "1000", True),
        (1000.4, "1,000", True),
        (0.00001234, "0.00001234", True),
        (1e-9, "1.000e-09", True),
        (-1234.5, "-1,234", True),
        (math.nan, "nan", True),
        (-math.inf, "-inf", True),
        ("", "", False),
        ("12", "12", False),
        ("<b>", "<b>", False),
        (["a", 1], "['a', 1]", False),
    ],
)
def test_a_plain_value_has_a_text(value, shown, is_number):
    assert text(value) == Cell(text=shown, is_number=is_number)


def test_digits_of_a_number_and_a_missing_one():
    assert text(0.123456, digits=2).text == "0.12"
    assert text(None) == Cell(text="")


def test_long_texts_and_texts_of_parts_need_a_wide_column():
    assert not Cell(text="x" * 40).is_long
    assert Cell(text="x" * 41).is_long
    assert Cell(text="a", items=["a"]).is_long


def test_a_cell_of_a_run_links_to_it():
    assert run_cell("a-0123abcd") == Cell(text="a-0123abcd", run="a-0123abcd")


def test_values_of_columns_by_run():
    rows = [{"run": "a", "mfu": 41.5, "cause": None}, {"run": "b", "cause": "oom"}]
    table = values_table(rows, ["mfu", "cause"], caption="c")
    assert (table.headings, table.columns, table.caption) == (["run", "mfu", "cause"], True, "c")
    assert [[cell.text for cell in line] for line in table.rows] == [["a", "41.50", ""], ["b", "", "oom"]]
    assert values_table([], ["mfu"], caption="c").rows == []
