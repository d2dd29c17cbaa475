"""The account of one recipe: rows for people and plain values, of one rank and of a pipeline."""

from __future__ import annotations

import json

import pytest

from tests.plan.layouts import planned
from titanlab.errors import ConfigError
from titanlab.parallelism import Parallelism
from titanlab.plan import explain, explanation_values, memory_rows, time_rows, traffic_rows


@pytest.fixture(scope="module")
def single():
    return explain(planned(world=1, batch=4))


@pytest.fixture(scope="module")
def piped():
    return explain(planned(world=4, parallelism=Parallelism(shard=2, pipeline=2)))


def test_one_rank_has_no_pipeline_and_sends_nothing(single):
    assert single.timeline is None
    assert traffic_rows(single.traffic) == []
    headings, rows = memory_rows(single)
    assert headings == ["", "GB"]
    assert {len(row) for row in rows} == {2}
    values = explanation_values(single)
    assert (values["bubble_share"], values["peak_in_flight"], values["traffic"]) == (None, None, [])


def test_each_rank_of_a_pipeline_has_a_column(piped):
    headings, rows = memory_rows(piped)
    assert headings == ["GB", "rank 0", "rank 1"]
    assert [row[0].partition(" (")[0] for row in rows[-3:]] == ["allocated", "reserved", "largest at"]
    for column in (1, 2):
        sizes = [float(row[column]) for row in rows[:-3]]
        assert sum(sizes) == pytest.approx(float(rows[-3][column]), abs=0.01 * len(sizes))


def test_parts_of_the_time_add_up(piped):
    rows = time_rows(piped.time)
    assert rows[-1][0] == "step"
    assert rows[-1][2] == "100.0%"
    assert sum(float(row[2].rstrip("%")) for row in rows[:-1]) == pytest.approx(100, abs=0.5)
    assert all(float(row[1]) > 0 for row in rows)


def test_the_values_are_json_and_those_of_the_account(piped):
    values = explanation_values(piped)
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    assert 0 < values["bubble_share"] < 1
    assert len(values["peak_in_flight"]) == 2
    assert [rank["allocated_bytes"] for rank in values["ranks"]] == [sum(r["items"].values()) for r in values["ranks"]]
    assert all(rank["reserved_bytes"] >= rank["allocated_bytes"] for rank in values["ranks"])
    assert {row["axis"] for row in values["traffic"]} >= {"shard", "pipeline"}


def test_a_recipe_that_breaks_a_rule_has_no_account():
    with pytest.raises(ConfigError, match=r"^training\.global_batch=3: "):
        explain(planned(world=2, batch=3))
