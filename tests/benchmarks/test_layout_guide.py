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


# The others in `make test-full`.
@pytest.mark.parametrize("number", [0, 12, *(pytest.param(number, marks=pytest.mark.full) for number in (5, 8, 16))])
def test_the_first_table_is_the_planners(guide, kept, number):
    assert len(kept["recipes"]) == len(guide.RECIPES)
    assert list(guide.differences(kept["recipes"][number], guide.as_it_stands(*guide.RECIPES[number]))) == []


@pytest.mark.full
@pytest.mark.parametrize("cluster", ["a100_40gb", "h100_25gbe"])
def test_other_machines_are_the_planners(guide, kept, cluster):
    for case, arguments in guide.ON_MACHINES.items():
        assert list(kept["machines"][case]) == list(guide.MACHINES)
        assert list(guide.differences(kept["machines"][case][cluster], guide.on_machine(arguments, cluster))) == []


def test_every_recipe_of_the_first_table_is_for_its_gpus(kept):
    for row in kept["recipes"]:
        assert f"_{row['gpus']}gpus" in row["recipe"]


def test_estimates_of_measured_runs_are_the_planners(guide, kept):
    for run, row in zip(guide.MEASURED[1::2], kept["measured"][1::2], strict=True):
        assert guide.estimated(*run) == row
