"""The tables of docs/choosing-a-layout.md are what their script writes, the results are the planner's, and the words hold."""

from __future__ import annotations

import json

import pytest

from tests.benchmarks.scripts import script

# Study, index of the row: their searches are the shortest.
CHEAP = [("8b", 0), ("8b", 8)]
SLOWER = [("8b", 3), ("70b", 9), ("405b", 8)]


@pytest.fixture(scope="module")
def tables():
    return script("layout_guide_page")


@pytest.fixture(scope="module")
def guide(tables):
    return script("layout_guide")


@pytest.fixture(scope="module")
def kept(guide):
    return json.loads(guide.RESULT.read_text())


def test_the_page_is_in_step(guide, tables, kept):
    text = guide.PAGE.read_text()
    assert tables.page(text, kept) == text


@pytest.mark.parametrize(("name", "number"), [*CHEAP, *(pytest.param(*row, marks=pytest.mark.full) for row in SLOWER)])
def test_rows_are_the_planners(guide, kept, name, number):
    row = kept["studies"][name][number]
    assert (
        list(guide.differences(row["best"], guide.row(guide.STUDIES[name].arguments(row["seq_len"], row["gpus"]))))
        == []
    )


def test_estimates_of_measured_runs_are_the_planners(guide, kept):
    for run, row in zip(guide.MEASURED[1::2], kept["measured"][1::2], strict=True):
        assert guide.estimated(*run) == row
