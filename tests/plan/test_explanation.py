"""The account of one recipe, its rows for people and plain values; and the short form: hours, memory, a checkpoint."""

from __future__ import annotations

import dataclasses
import json

import pytest

from tests.plan.recipes import SMALL, made, planned
from titanlab.errors import ConfigError
from titanlab.parallelism import Parallelism
from titanlab.plan import (
    Estimate,
    estimate_of,
    estimate_or_reason,
    explain,
    explanation_values,
    machine_of,
    memory_rows,
    time_rows,
    traffic_rows,
)
from titanlab.plan.search import MARGIN
from titanlab.plan.step_time import step_time


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


@pytest.mark.parametrize("degrees", [{}, {"shard": 8}, {"shard": 3}, {"replicate": 2, "tensor": 4}, {"pipeline": 2}])
def test_a_checkpoint_has_every_number_once_in_any_layout(degrees):
    """4 bytes for each parameter and its two averages, and a count of updates for each tensor; no shard's padding."""
    found = estimate_of(made(model=SMALL, seq_len=256, batch=24, **degrees))
    assert found is not None
    account = SMALL.account()
    assert found.checkpoint_bytes == 12 * account.parameter_count + 4 * len(account.parameters)


def test_hours_are_those_of_all_steps():
    recipe = made(model=SMALL, shard=2, seq_len=256)
    hours = {}
    for steps in (1, 7200):
        training = dataclasses.replace(recipe.training, steps=steps)
        hours[steps] = estimate_of(dataclasses.replace(recipe, training=training)).hours
    assert hours[7200] == pytest.approx(2 * step_time(recipe, machine_of(recipe)).seconds)
    assert hours[1] == pytest.approx(hours[7200] / 7200)


def test_a_run_fits_up_to_the_limit_and_anywhere_if_none_is_known():
    facts = {"hours": 1.0, "checkpoint_bytes": 0}
    assert [Estimate(**facts, reserved_bytes=10, limit_bytes=limit).fits for limit in (10.0, 9.0, None)] == [
        *(True, False, True)
    ]
    known = estimate_of(made(model=SMALL, seq_len=256, cluster={"memory_gb": 10}))
    assert known.limit_bytes == pytest.approx(10e9 * (1 - MARGIN))
    # No figure of JSON is infinite.
    cpu = {"accelerator": "cpu", "device": "cpu", "memory_gb_per_second": 9.0}
    unknown = estimate_of(made(model=SMALL, seq_len=256, cluster=cpu))
    assert unknown.limit_bytes is None
    json.dumps(unknown.to_mapping(), allow_nan=False)


@pytest.mark.parametrize(
    ("cluster", "reason"),
    [
        ({"accelerator": "cpu", "device": "cpu"}, "these CPUs were not measured (titanlab plan --measure)"),
        ({"device": "Strange 9000"}, "cluster.device=Strange 9000: nothing is known of its speed"),
        ({"device": None}, "cluster.device=null: an estimate needs a device"),
        ({"device": "A\nB"}, "cluster.device=A B: nothing is known of its speed"),
        ({"efficiencies": {"product": 7.0}}, "cluster.efficiencies.product=7.0: must lie between 0.01 and 1"),
    ],
)
def test_without_an_estimate_there_is_a_reason(cluster, reason):
    recipe = made(model=SMALL, seq_len=256, cluster=cluster)
    assert estimate_or_reason(recipe) == reason
    assert estimate_of(recipe) is None
