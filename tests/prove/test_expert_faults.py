"""Faults of mixtures of experts that were found in other libraries, planted here: each makes another model."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest

from tests import tiny
from tests.prove.test_experts import BAR, recipe, traced
from titanlab.costs import account
from titanlab.prove.parity import compare
from titanlab.train.balance import Balance

# Balance of the first step shows in the routing of the second.
STEPS = {"steps": 2}


def without_sums_of_routers(made, run):
    """torchtitan #4054: tensor ranks keep their own part of the router's gradient."""
    styles = {**account.STYLES, "router": replace(account.STYLES["router"], treats_part=False)}
    with patch.object(account, "STYLES", styles):
        return traced(made, run)


def with_own_counts(made, run):
    """Each rank updates biases from the counts of its own tokens."""
    unpatched = Balance.learn

    def learn(balance, sums):
        unpatched(balance, balance.sums())

    with patch.object(Balance, "learn", learn):
        return traced(made, run)


def with_auxiliary_losses_by_microbatch(made, run):
    """NeMo Automodel #3359: the auxiliary loss is a mean of each microbatch, added once for each of them."""
    unpatched = Balance.__init__

    def init(balance, *given, scale, **named):
        unpatched(balance, *given, scale=scale * made.microbatches, **named)

    with patch.object(Balance, "__init__", init):
        return traced(made, run)


@pytest.mark.parametrize(
    ("fault", "model"),
    [
        pytest.param(with_own_counts, "qwen3", marks=pytest.mark.full),
        (with_auxiliary_losses_by_microbatch, "sequence"),
    ],
)
def test_faults_of_balance_are_seen(pool, tmp_path, fault, model):
    reference = recipe(tmp_path, model, STEPS)
    made = recipe(tmp_path, model, {"shard": 2, "microbatch": 1, **STEPS})
    wanted = pool.run(1, traced, reference, tiny.begin(reference))[0]
    found = pool.run(2, fault, made, tiny.begin(made))[0]
    assert compare(wanted, found).largest > 100 * BAR
    if fault is with_own_counts:
        assert found.loads[0] == wanted.loads[0]
        assert found.loads[1:] != wanted.loads[1:]


@pytest.mark.parametrize("fault", [without_sums_of_routers])
def test_a_router_whose_gradient_is_not_summed_over_tensor_ranks(pool, tmp_path, fault):
    reference = recipe(tmp_path, "qwen3", STEPS)
    made = recipe(tmp_path, "qwen3", {"tensor": 2, "sequence_parallel": False, **STEPS})
    wanted = pool.run(1, traced, reference, tiny.begin(reference))[0]
    difference = compare(wanted, pool.run(2, fault, made, tiny.begin(made))[0])
    assert difference.gradient[0] > 1000 * BAR, difference
    assert "router" in difference.gradient[1]
