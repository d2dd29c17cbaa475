"""Where recipes differ from the best one's: by key, redacted, of bounded length, and None where nothing can be read."""

from __future__ import annotations

import pytest

from tests.report.plain import facts_in
from tests.sweep.made import begin, end
from titanlab.report.facts import differences, differing


@pytest.mark.parametrize(
    ("then", "now", "expected"),
    [
        ({}, {}, []),
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}, [("a.c", "2", "3")]),
        ({"a": 1}, {"b": 2}, [("b", "–", "2"), ("a", "1", "–")]),
        ({"a": None}, {"a": True}, [("a", "null", "true")]),
        ({"a": None}, {}, [("a", "null", "–")]),
        ({"a": {}}, {"a": {"b": 1}}, [("a.b", "–", "1"), ("a", "{}", "–")]),
        ({"a": [1, 2]}, {"a": [2, 1]}, [("a", "[1, 2]", "[2, 1]")]),
        ({"name": "x", "runs": "a", "repeat": 0, "sweep": "s"}, {"name": "y", "runs": "b", "repeat": 1}, []),
        ({"a": 1}, {"a": True}, [("a", "1", "true")]),
        ({"a": False}, {"a": 0}, [("a", "false", "0")]),
        ({"a": float("nan")}, {"a": float("nan")}, []),
        ({"a": 1}, {"a": 1.0}, []),
    ],
)
def test_keys_whose_values_differ(then, now, expected):
    assert differing(then, now) == expected


def test_texts_are_short_and_without_secrets():
    ((_, before, after),) = differing({"a": "x" * 201}, {"a": "api_key=abcdefgh12345678"})
    assert before == "x" * 200 + "…"
    assert "abcdefgh12345678" not in after


@pytest.fixture
def two(made):
    for name, keys in (("single", {}), ("fsdp", {"shard": 2, "seq_len": 64})):
        run = made.run(name, **keys)
        begin(run)
        end(run)
    return made


def test_each_recipe_is_compared_with_the_reference(two):
    facts = facts_in(two.folder)
    reference = next(row for row in facts.rows if row["name"] == "single")
    found = {group.rows[0]["name"]: items for group, items in differences(facts, reference)}
    assert found["single"] == []
    keys = {key: values for key, *values in found["fsdp"]}
    assert keys["training.seq_len"] == ["32", "64"]
    assert keys["parallelism.shard"] == ["1", "2"]


def test_a_config_that_cannot_be_read_is_none_and_hides_no_other(two):
    facts = facts_in(two.folder)
    single, fsdp = sorted(facts.rows, key=lambda row: row["name"], reverse=True)
    for path in (two.folder.path / fsdp["run"]).rglob("config.yaml"):
        path.write_text("{")
    found = {group.rows[0]["name"]: items for group, items in differences(facts, single)}
    assert found == {"single": [], "fsdp": None}
    assert differences(facts, fsdp) is None
