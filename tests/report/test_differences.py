"""Where recipes differ from the best one's: by key, redacted, of bounded length, and None where nothing can be read."""

from __future__ import annotations

import pytest

from tests.report.plain import facts_in
from tests.sweep.made import begin, end
from titanlab.report.facts import differences


def test_texts_are_short_and_without_secrets(two):
    facts = facts_in(two.folder)
    single, fsdp = sorted(facts.rows, key=lambda row: row["name"], reverse=True)
    (path,) = (two.folder.path / fsdp["run"] / "attempts").rglob("config.yaml")
    text = path.read_text().replace("init_from: null", f"init_from: {'x' * 201}")
    path.write_text(text.replace("load_from: null", "load_from: api_key=abcdefgh12345678"))
    (items,) = (items for group, items in differences(facts, single) if group.rows[0]["name"] == "fsdp")
    values = {key: value for key, _, value in items}
    assert values["init_from"] == "x" * 200 + "…"
    assert "abcdefgh12345678" not in values["checkpoint.load_from"]


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
