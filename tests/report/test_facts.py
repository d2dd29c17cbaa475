"""What a report is made of: checked rows, groups in order, and files that may be damaged."""

import math

import pytest

from tests.report.plain import facts_in, facts_of, run
from tests.sweep.made import begin, end, train
from tests.sweep.table.plain import row
from titanlab.report.facts import at, checked, representative


@pytest.mark.parametrize(
    ("column", "value", "kept"),
    [
        ("oversubscribed", True, True),
        ("oversubscribed", 1, None),
        ("oversubscribed", "yes", None),
        ("step", 3, 3),
        ("step", True, None),
        ("step", "3", None),
        ("tokens_per_second", 2.5, 2.5),
        ("tokens_per_second", math.nan, None),
        ("tokens_per_second", math.inf, None),
        ("tokens_per_second", "fast", None),
        ("tokens_per_second", {}, None),
        ("cause", "no", "no"),
        ("cause", 3, None),
        ("cause", ["a"], None),
        ("cause", None, None),
        # Columns of swept keys are text.
        ("point.lr", "0.5", "0.5"),
        ("point.lr", {"a": 1}, None),
    ],
)
def test_a_value_of_another_type_counts_as_missing(column, value, kept):
    (found,) = checked([{column: value}])
    assert found == {column: kept}
    assert type(found[column]) is type(kept)


def test_rows_of_earlier_versions_lack_columns():
    assert checked([]) == []
    assert checked([{}, {"later": object}]) == [{}, {"later": None}]


@pytest.mark.parametrize(
    ("value", "keys", "found"),
    [
        ({"a": {"b": 1}}, ("a", "b"), 1),
        ({"a": {"b": 1}}, (), {"a": {"b": 1}}),
        ({"a": "text"}, ("a", "b"), None),
        ({"a": [1]}, ("a", "0"), None),
        ({}, ("a", "b", "c"), None),
        (None, ("a",), None),
    ],
)
def test_a_value_below_keys(value, keys, found):
    assert at(value, *keys) == found


def test_runs_are_all_but_dropped_points_and_done_ones_have_ended():
    facts = facts_of(row(), row(state="dropped"), row(outcome="oom"), row(state="queued", outcome="done"))
    assert [each["run"] for each in facts.runs] == ["r0", "r2", "r3"]
    assert [each["run"] for each in facts.done] == ["r0"]


def test_the_fastest_recipe_is_first_and_what_says_nothing_is_last():
    facts = facts_of(
        row("slow", 10.0),
        row("unmeasured", None),
        row("crowded", 900.0, oversubscribed=True),
        row("fast", 30.0),
        row("fast", 10.0),
        row("failed", 99.0, outcome="oom"),
    )
    assert [group.layout for group in facts.groups] == ["fast", "slow", "unmeasured", "failed", "crowded"]
    assert [(group.layout, each["run"]) for group, each in facts.shown][:2] == [("fast", "r3"), ("slow", "r0")]


def test_the_number_of_recipes_that_are_looked_at_is_limited():
    facts = facts_of(*(row(f"l{place}") for place in range(30)))
    assert (len(facts.groups), len(facts.shown)) == (30, 24)


def test_a_run_that_is_done_stands_for_its_recipe():
    (group,) = facts_of(run("a", outcome="oom"), run("b"), run("c")).groups
    assert representative(group)["run"] == "b"
    (group,) = facts_of(run("a", outcome="oom"), run("b", outcome="nan")).groups
    assert representative(group)["run"] == "a"


def test_files_of_a_run_that_is_gone_are_nothing():
    facts = facts_of(run("gone"))
    (gone,) = facts.runs
    assert (facts.config(gone), facts.env(gone), facts.metrics(gone, "train")) == (None, {}, [])


def test_files_are_those_of_the_latest_attempt(made):
    made_run = made.run("a", shard=2)
    begin(made_run)
    train(made_run, step=2)
    end(made_run, "crash")
    begin(made_run, seed=5)
    train(made_run, step=3)
    facts = facts_in(made.folder)
    (found,) = facts.runs
    assert found["attempt"] == 2
    assert facts.config(found)["seed"] == 5
    # An attempt of which no folder is left.
    assert facts.config({**found, "attempt": 9})["seed"] == 0
    assert facts.config({**found, "attempt": None})["seed"] == 0
    assert facts.env(found)["launcher"] == "local"
    assert [each["step"] for each in facts.metrics(found, "train")][-3:] == [1, 2, 3]
    assert facts.metrics(found, "breakdown") == []


def test_metrics_are_read_once(made):
    begin(made_run := made.run("a"))
    train(made_run, step=2)
    facts = facts_in(made.folder)
    (found,) = facts.runs
    first = facts.metrics(found, "train")
    (made_run.path / "metrics.jsonl").unlink()
    assert facts.metrics(found, "train") == first
    assert len(first) == 2


@pytest.mark.parametrize("text", ["{", "[]", "\x00"])
def test_a_damaged_config_is_none(made, text):
    begin(made_run := made.run("a"))
    facts = facts_in(made.folder)
    (found,) = facts.runs
    (made_run.path / "attempts/1/config.yaml").write_text(text)
    assert facts.config(found) is None
