"""Counts of experts' tokens in metrics.jsonl: few rows, nothing lost between them, equal under all layouts."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests import tiny
from tests.training.test_balance import loads, recipe
from titanlab.techniques.tracker.trackers_schema import Jsonl
from titanlab.train.balance import ExpertRows, Load


def written(steps, done, counts=lambda step: [[float(step), 1.0]]):
    rows = {}
    experts = ExpertRows(steps, lambda step, row: rows.update({step: row}))
    for step in done:
        experts.after_step(step, Load(counts(step), [0.0], 1))
    experts.at_end(done[-1])
    return rows


def test_rows_are_at_equal_distances_and_sum_what_lies_between():
    rows = written(1000, range(1, 1001))
    assert list(rows) == [1, *range(50, 1001, 50)]
    assert [row["steps"] for row in rows.values()] == [1, 49, *[50] * 19]
    assert rows[100]["counts"] == [[sum(range(51, 101)), 50]]
    assert all(isinstance(count, int) for count in rows[50]["counts"][0])


@pytest.mark.parametrize("steps", [1, 2, 19, 20, 21, 39, 999])
def test_a_run_of_any_length_has_few_rows_and_its_last_step(steps):
    rows = written(steps, range(1, steps + 1))
    assert len(rows) <= 22
    assert max(rows) == steps
    assert sum(row["steps"] for row in rows.values()) == steps


def test_a_run_that_ends_early_or_is_resumed_says_how_many_steps_it_counts():
    assert list(written(1000, range(1, 61)).items())[-1] == (60, {"steps": 10, "counts": [[sum(range(51, 61)), 10]]})
    assert {step: row["steps"] for step, row in written(1000, range(93, 151)).items()} == {100: 8, 150: 50}


def test_steps_that_are_done_again_are_counted_once():
    rows = {}
    experts = ExpertRows(100, lambda step, row: rows.update({step: row}))
    for step in (2, 3):
        experts.after_step(step, Load([[1.0]], [0.0], 1))
    experts.go_back()
    for step in (2, 3, 4, 5):
        experts.after_step(step, Load([[1.0]], [0.0], 1))
    assert rows == {5: {"steps": 4, "counts": [[4]]}}


def test_a_run_records_the_counts_of_its_steps_and_its_tracker_does_not(tmp_path):
    found, run = loads(recipe(tmp_path))
    rows = run.metrics("experts")
    assert [row["counts"] for row in rows] == [load.counts for load in found]
    assert all(sum(block) == 4 * 32 * 2 for row in rows for block in row["counts"])
    assert "counts" not in json.dumps(run.metrics("train"))
    assert isinstance(recipe(tmp_path).tracker, Jsonl)


def test_layouts_have_the_same_rows(pool, tmp_path):
    """Each stage of a pipeline holds its own blocks, and each rank counts its own tokens."""
    alone = recipe(tmp_path / "1")
    wanted = counts_of(alone, pool)
    spread = recipe(tmp_path / "2", shard=2, pipeline=2, expert=2, microbatch=1)
    assert counts_of(spread, pool) == wanted
    assert len(wanted) == 4
    assert {len(row["counts"]) for row in wanted} == {2}


def counts_of(made, pool):
    run = tiny.begin(replace(made))
    pool.run(made.world, tiny.as_rank, made, run)
    return [{"step": row["step"], "steps": row["steps"], "counts": row["counts"]} for row in run.metrics("experts")]
