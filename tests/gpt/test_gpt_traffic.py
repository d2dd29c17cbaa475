"""What is sent for a model from outside is what the formulas say: biases of every kind, two tables, whole parameters."""

from __future__ import annotations

import pytest

from tests import tiny
from tests.costs.test_traffic_account import traffic_of
from tests.gpt.test_gpt_parity import keys_of, label
from titanlab.costs import step_traffic, traffic_metrics
from titanlab.recipe import step_of

LAYOUTS = [
    ("plain", {"tensor": 2}, True),
    ("tied head", {"shard": 2, "tensor": 2}, False),
    ("plain", {"tensor": 2, "sequence_parallel": False, "loss_parallel": False}, False),
    ("plain", {"pipeline": 2, "context": 2}, False),
]


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        pytest.param(kind, given, id=label(kind, given), marks=[] if always else [pytest.mark.full])
        for kind, given, always in LAYOUTS
    ],
)
def test_what_is_sent_is_what_the_formulas_say(pool, tmp_path, kind, given):
    made = tiny.recipe(tmp_path, **keys_of(kind, **given))
    for place, tables in pool.run(made.world, traffic_of, made, 1):
        for rows in tables:
            assert traffic_metrics(rows) == traffic_metrics(step_traffic(step_of(made), place)), place
