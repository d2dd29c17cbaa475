"""Faults of mixtures of experts that were found in other libraries, planted here: each makes another model."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest

from tests import tiny
from tests.parity.test_experts import BAR, recipe, traced
from titanlab.costs import tensor_styles
from titanlab.parity.parity import compare


def without_sums_of_routers(made, run):
    """torchtitan #4054: tensor ranks keep their own part of the router's gradient."""
    styles = {**tensor_styles.STYLES, "router": replace(tensor_styles.STYLES["router"], treats_part=False)}
    with patch.object(tensor_styles, "STYLES", styles):
        return traced(made, run)


@pytest.mark.parametrize("fault", [without_sums_of_routers])
def test_a_router_whose_gradient_is_not_summed_over_tensor_ranks(pool, tmp_path, fault):
    reference = recipe(tmp_path, "qwen3", {})
    made = recipe(tmp_path, "qwen3", {"tensor": 2, "sequence_parallel": False})
    wanted = pool.run(1, traced, reference, tiny.begin(reference))[0]
    difference = compare(wanted, pool.run(2, fault, made, tiny.begin(made))[0])
    assert difference.gradient[0] > 1000 * BAR, difference
    assert "router" in difference.gradient[1]
