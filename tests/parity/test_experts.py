"""Models with experts train on layouts as in one process: losses, norms, gradients, parameters and routing."""

import os

import pytest

from tests import tiny
from tests.parity.parity_rows import COMMON, OnLayout
from titanlab.distributed.ranks import ALONE, joined
from titanlab.model.mixtral_schema import Mixtral
from titanlab.model.qwen3_moe_schema import Qwen3Moe
from titanlab.parity import parity
from titanlab.parity.parity import compare

# As in docs/parity.md: the difference comes from the order in which sums are rounded.
BAR = 1e-5
SIZES = {"dim": 64, "layers": 4, "heads": 4, "kv_heads": 2, "vocab_size": 256}
MODELS = {
    "qwen3": Qwen3Moe(**SIZES, head_dim=32, ffn_dim=32, experts=8, active_experts=2),
    # 6 experts cannot be divided among 4 shards.
    "mixtral": Mixtral(**SIZES, ffn_dim=48, experts=6, active_experts=3),
}
FULL = [pytest.mark.full]
ROWS = [
    ("qwen3", {"tensor": 2}, []),
    ("qwen3", {"shard": 2, "tensor": 2, "pipeline": 2, "schedule": "zbv"}, []),
    ("mixtral", {"shard": 4}, []),
    ("qwen3", {"tensor": 2, "sequence_parallel": False}, FULL),
    ("qwen3", {"replicate": 2}, FULL),
    ("qwen3", {"replicate": 2, "shard": 2, "microbatch": 1}, FULL),
    ("qwen3", {"context": 2, "shard": 2}, FULL),
    ("qwen3", {"replicate": 2, "context": 2, "tensor": 2}, FULL),
    ("qwen3", {"pipeline": 2, "schedule": "interleaved_1f1b"}, FULL),
    ("qwen3", {"pipeline": 2, "shard": 2, "schedule": "interleaved_zero_bubble"}, FULL),
    ("qwen3", {"pipeline": 2, "schedule": "dualpipe_v"}, FULL),
    ("qwen3", {"pipeline": 2, "context": 2, "tensor": 2, "shard": 2}, FULL),
    ("mixtral", {"shard": 4, "tensor": 2}, FULL),
    ("mixtral", {"pipeline": 2, "tensor": 2}, FULL),
]


def traced(made, run):
    return parity.trace(made, run, joined(os.environ) or ALONE)


def recipe(folder, model, given):
    common = {key: value for key, value in COMMON.items() if key != "layers"}
    return tiny.recipe(folder, model=MODELS[model], **OnLayout(given).keys(common))


@pytest.fixture(scope="module")
def reference(pool, tmp_path_factory):
    known = {}

    def of(model):
        if model not in known:
            made = recipe(tmp_path_factory.mktemp("reference"), model, {})
            known[model] = pool.run(1, traced, made, tiny.begin(made))[0]
        return known[model]

    return of


@pytest.mark.parametrize(
    ("model", "given"),
    [pytest.param(model, given, marks=marks, id=f"{model}, {OnLayout(given).label}") for model, given, marks in ROWS],
)
def test_a_layout_trains_as_one_process(pool, reference, tmp_path, model, given):
    made = recipe(tmp_path, model, given)
    difference = compare(reference(model), pool.run(made.world, traced, made, tiny.begin(made))[0])
    assert difference.largest <= BAR, difference
    assert any(name.endswith("router.weight") for name in reference(model).gradients)
