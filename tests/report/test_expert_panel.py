"""The panel of the load of experts: what it says of a run's rows, and what it makes of rows that no run writes."""

from __future__ import annotations

import json

import pytest

from tests.sweep.made import begin, end, train
from titanlab.records.metrics_file import read_metrics
from titanlab.report import write_report
from titanlab.report.facts import Facts, checked
from titanlab.report.panels import expert_panel
from titanlab.report.report import sweep_figures
from titanlab.sweep import SweepTable

EVEN = [[10, 10, 10, 10], [10, 10, 10, 10]]
SKEWED = [[40, 0, 0, 0], [5, 15, 10, 10]]


def run_of(made, name, *rows, **given):
    run = made.run(name, **given)
    begin(run)
    train(run)
    with (run.path / "metrics.jsonl").open("a") as file:
        for step, counts in rows:
            file.write(json.dumps({"kind": "experts", "step": step, "attempt": 1, "steps": 2, "counts": counts}) + "\n")
    end(run)
    return run


def panel_of(made):
    made.write()
    return expert_panel(Facts(made.folder, checked(SweepTable(made.folder).rows()), 0.0))


def test_the_newest_row_of_each_recipe_is_drawn_and_equal_ones_once(made):
    first = run_of(made, "fsdp", (2, SKEWED), (4, EVEN), shard=2)
    second = run_of(made, "tp", (4, EVEN), tensor=2)
    run_of(made, "single", (4, SKEWED))
    panel = panel_of(made)
    assert panel is not None
    marks = list(panel.figure.marks.values())
    assert len(marks) == 2
    equal = next(mark for mark in marks if len(mark.runs) == 2)
    assert {*equal.runs} == {first.path.name, second.path.name}
    assert "and 1 recipe with the same counts, steps 3 to 4: at most 1.00 of an equal share" in equal.text
    (skewed,) = (mark for mark in marks if mark is not equal)
    assert "at most 4.00 of an equal share (block 0, expert 0), at least 0.00 (block 0, expert 1)" in skewed.text
    assert "3 experts without a token" in skewed.text
    assert "3 experts without a token" in panel.description
    # A row for each block of each map.
    assert len(panel.values.rows) == 4
    assert [cell.text for cell in panel.values.rows[-2]][-5:] == ["0", "4.000", "1", "0.000", "3"]


def test_a_sweep_without_experts_has_no_such_figure(made, tmp_path):
    run_of(made, "fsdp", shard=2)
    assert panel_of(made) is None
    assert "experts" not in sweep_figures(made.folder.path)
    page = write_report(made.folder, SweepTable(made.folder).rows(), into=tmp_path / "page.html").file.read_text()
    assert "Load of the experts" not in page


@pytest.mark.parametrize(
    "counts",
    [
        None,
        3,
        [],
        [[]],
        [[1, 2], [3]],
        [[1, "x"]],
        [[1, -1]],
        [[float("inf"), 1]],
        [[1e308, 1e308]],
        [{"a": 1}],
    ],
)
def test_counts_that_no_run_writes_are_passed_over(made, counts):
    run = run_of(made, "fsdp", (4, counts), shard=2)
    assert panel_of(made) is None
    assert read_metrics(run.path / "metrics.jsonl", "experts")


def test_the_page_has_the_map_with_its_words_and_values(made, tmp_path):
    run = run_of(made, "fsdp", (4, SKEWED), shard=2)
    made.write()
    report = write_report(
        made.folder, SweepTable(made.folder).rows(), into=tmp_path / "page.html", figures=tmp_path / "f"
    )
    page = report.file.read_text()
    assert "Load of the experts" in page
    # The picture is in the page, and names its run.
    start = page.index("<image", page.index('id="experts"'))
    picture = page[start : page.index(">", start)]
    assert 'href="data:image/png;base64' in picture
    assert f'data-run="{run.path.name}"' in picture
    assert "experts without a token" in page
    assert (tmp_path / "f" / "experts.png").stat().st_size > 1000
