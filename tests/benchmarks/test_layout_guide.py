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


def test_what_the_page_says_in_words_is_so(tables, kept):
    """A change of the estimates that makes a sentence wrong is found here."""
    rows = {
        (name, row["seq_len"], row["gpus"]): row["best"] for name, found in kept["studies"].items() for row in found
    }
    take = {place: tables.taken(found) for place, found in rows.items()}
    assert [take["8b", 8192, gpus] for gpus in (64, 512)] == ["1D", "1D"]
    assert take["70b", 8192, 512] == "1D"
    # Context parallelism from 32,768 tokens on.
    assert "cp" in rows["8b", 32768, 64]["2D"]["layout"]
    assert "cp" in rows["8b", 131072, 64]["2D"]["layout"]
    # A pipeline where nothing else fits.
    for place in [
        ("70b", 8192, 32),
        *(("405b", length, gpus) for length in (8192, 32768) for gpus in (256, 512, 2048)),
    ]:
        assert take[place] in tables.WITH_PIPELINE
        assert all("none" in rows[place][kind] for kind in tables.WITHOUT_PIPELINE)
    most = [max(found.get("tokens_per_second", 0) for found in rows["8b", 8192, gpus].values()) for gpus in (512, 4096)]
    assert 0.6 < most[1] / most[0] < 0.7
    piped = [row for row in kept["measured"] if row["schedule"]]
    errors = [row["tokens_per_second"] / row["measured"] - 1 for row in piped]
    assert round(sum(errors) / len(errors), 2) == 0.1
    assert round(max(errors), 2) == 0.17 < tables.WORTH_OF_PIPELINE
    assert all(row["tokens_per_second"] < row["measured"] for row in kept["measured"] if not row["schedule"])
