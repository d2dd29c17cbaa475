"""One recipe in a ranking: its figures, or why it has no place."""

import json
import math

import pytest

from tests.sweep.table.plain import row
from titanlab.sweep import RecipeRuns
from titanlab.sweep.ranking import counted_runs, entry_of


def entry(*rows, by="tps", limit=None):
    return entry_of(RecipeRuns("dp_s2", 2, {}, rows), by, limit)


def test_the_centre_is_the_geometric_mean_and_the_spread_that_of_logarithms():
    found = entry(row(speed=100.0, memory_gib=1.0), row(speed=400.0, memory_gib=3.0))
    assert (found.figures, found.runs, found.left_out) == ((100.0, 400.0), 2, None)
    assert found.centre == pytest.approx(200.0)
    assert found.spread_percent == pytest.approx(100 * math.log(4) / math.sqrt(2))
    assert (found.memory_gib, found.low, found.high, found.is_within_noise) == (3.0, None, None, None)


def test_one_run_has_no_spread():
    found = entry(row(speed=100.0))
    assert (found.runs, found.centre, found.spread_percent) == (1, pytest.approx(100.0), None)


@pytest.mark.parametrize(
    ("rows", "by", "limit", "reason"),
    [
        ([row(outcome="oom"), row(outcome="oom"), row(state="queued", outcome=None)], "tps", None,
         "no run is done: 2 oom, 1 queued"),
        ([row(memory_gib=None)], "tps", 80.0, "its memory is unknown, so that it cannot be held against the limit"),
        ([row(memory_gib=80.5)], "tps", 80.0, "needs 80.50 GiB, more than 80"),
        ([row(memory_gib=80.0)], "tps", 80.0, None),
        ([row(memory_gib=1.0), row(memory_gib=9.0)], "tps", 8.5, "needs 9.00 GiB, more than 8.5"),
        ([row(oversubscribed=True)], "tps", None,
         "oversubscribed: more processes than cores, so that its speed says nothing"),
        ([row(oversubscribed=True)], "mfu", None,
         "oversubscribed: more processes than cores, so that its speed says nothing"),
        ([row(oversubscribed=True)], "memory", None, None),
        ([row(speed=None)], "tps", None, "its speed was not measured: no step after warm-up"),
        ([row(mfu_percent=None)], "mfu", None, "has no MFU: the peak of its device is unknown"),
        ([row(memory_gib=None)], "memory", None, "its memory was not measured"),
        # The limit goes before the rest.
        ([row(memory_gib=9.0, oversubscribed=True)], "tps", 8.0, "needs 9.00 GiB, more than 8"),
    ],
)  # fmt: skip
def test_a_recipe_without_a_place_says_why(rows, by, limit, reason):
    assert entry(*rows, by=by, limit=limit).left_out == reason


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf, 0.0, -1.0])
def test_what_is_no_ratio_does_not_count(value):
    found = entry(row(speed=value, memory_gib=value), row(speed=10.0, memory_gib=2.0))
    assert (found.figures, found.memory_gib) == ((10.0,), 2.0)


def test_runs_count_that_are_done_and_had_a_core_for_each_process():
    rows = [row(), row(oversubscribed=True), row(outcome="hang"), row(oversubscribed=None)]
    group = RecipeRuns("dp_s2", 2, {}, rows)
    assert counted_runs(group, "tps") == counted_runs(group, "mfu") == [rows[0], rows[3]]
    assert counted_runs(group, "memory") == [rows[0], rows[1], rows[3]]


def test_an_entry_as_plain_values():
    rows = [row(run="a-1", control=True), row(run="a-2", outcome="oom", control=True)]
    found = entry_of(RecipeRuns("dp_s2", 2, {"precision": "bf16"}, rows), "tps", None)
    assert json.loads(json.dumps(found.to_mapping())) == {
        "recipe": "dp_s2 · bf16",
        "layout": "dp_s2",
        "world": 2,
        "differing": {"precision": "bf16"},
        "is_control": True,
        "runs": ["a-1", "a-2"],
        "ends": {"done": 1, "oom": 1},
        "figures": [1000.0],
        "centre": pytest.approx(1000.0),
        "interval": None,
        "spread_percent": None,
        "memory_gib": 1.0,
        "is_within_noise": None,
        "left_out": None,
    }
