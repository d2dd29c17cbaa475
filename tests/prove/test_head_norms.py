"""Models whose queries and keys are normalised in each head train on layouts as in one process.

A rank of tensor parallelism has some of the heads, so its gradient of a head's norm is a part of the sum, with and
without sequence parallelism. In `make test` it is the model of test_experts.py that has such norms with it.
"""

import os

import pytest

from tests import tiny
from tests.prove.parity_rows import COMMON, OnLayout
from titanlab.distributed import ALONE, joined
from titanlab.prove import parity
from titanlab.prove.parity import compare
from titanlab.techniques.model.llama_schema import Qwen3

# As in docs/parity.md: the difference comes from the order in which sums are rounded.
BAR = 1e-5
MODEL = {"dim": 64, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn_dim": 192, "vocab_size": 256}
ROWS = [
    ({"tensor": 2}, [pytest.mark.full]),
    # Without it nothing else sums these gradients.
    ({"tensor": 2, "sequence_parallel": False}, []),
    ({"shard": 2, "tensor": 2, "pipeline": 2, "schedule": "zbv"}, [pytest.mark.full]),
    ({"replicate": 2, "context": 2, "tensor": 2}, [pytest.mark.full]),
]


def traced(made, run):
    return parity.trace(made, run, joined(os.environ) or ALONE)


def recipe(folder, given):
    common = {key: value for key, value in COMMON.items() if key != "layers"}
    return tiny.recipe(folder, model=Qwen3(**MODEL), **OnLayout(given).keys(common))


@pytest.fixture(scope="module")
def reference(pool, tmp_path_factory):
    made = recipe(tmp_path_factory.mktemp("reference"), {})
    return pool.run(1, traced, made, tiny.begin(made))[0]


@pytest.mark.parametrize("given", [pytest.param(given, marks=marks, id=OnLayout(given).label) for given, marks in ROWS])
def test_a_layout_trains_as_one_process(pool, reference, tmp_path, given):
    made = recipe(tmp_path, given)
    difference = compare(reference, pool.run(made.world, traced, made, tiny.begin(made))[0])
    assert difference.largest <= BAR, difference
    assert any(name.endswith("q_norm.weight") for name in reference.gradients)
