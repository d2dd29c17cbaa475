"""What one run takes: hours of all its steps, bytes of a checkpoint by hand, and why there is no estimate."""

from __future__ import annotations

import dataclasses
import math

import pytest

from tests.plan.recipes import SMALL, made
from titanlab.plan import estimate_of, estimate_or_reason, machine_of
from titanlab.plan.explanation import Estimate
from titanlab.plan.search import MARGIN
from titanlab.plan.step_time import step_time

PARAMETERS = SMALL.account().parameter_count
TENSORS = len(SMALL.account().parameters)


@pytest.mark.parametrize("degrees", [{}, {"shard": 8}, {"shard": 3}, {"replicate": 2, "tensor": 4}, {"pipeline": 2}])
def test_a_checkpoint_has_every_number_once_in_any_layout(degrees):
    """4 bytes for each parameter and its two averages, and a count of updates for each tensor; no shard's padding."""
    found = estimate_of(made(model=SMALL, seq_len=256, batch=24, **degrees))
    assert found is not None
    assert found.checkpoint_bytes == 12 * PARAMETERS + 4 * TENSORS


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
    assert Estimate(**facts, reserved_bytes=10, limit_bytes=10.0).fits
    assert not Estimate(**facts, reserved_bytes=11, limit_bytes=10.0).fits
    assert Estimate(**facts, reserved_bytes=10**15, limit_bytes=None).fits


def test_the_limit_leaves_a_margin_and_is_null_where_memory_is_not_known():
    known = estimate_of(made(model=SMALL, seq_len=256, cluster={"memory_gb": 10}))
    assert known.limit_bytes == pytest.approx(10e9 * (1 - MARGIN))
    # No figure of JSON is infinite.
    cpu = {"accelerator": "cpu", "device": "cpu", "memory_gb_per_second": 9.0}
    unknown = estimate_of(made(model=SMALL, seq_len=256, cluster=cpu))
    assert unknown.limit_bytes is None
    assert all(value is None or math.isfinite(value) for value in unknown.to_mapping().values())


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
