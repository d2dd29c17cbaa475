"""Models with experts train on layouts as in one process: losses, norms, gradients, parameters and routing."""

import os
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from tests import tiny
from tests.prove.parity_rows import COMMON, OnLayout
from titanlab.distributed import ALONE, joined
from titanlab.prove import parity
from titanlab.prove.parity import compare
from titanlab.techniques.model.llama_schema import Mixtral, Qwen3Moe
from titanlab.techniques.model.mixture_of_experts import Router

# As in docs/parity.md: the difference comes from the order in which sums are rounded.
BAR = 1e-5
SIZES = {"dim": 64, "layers": 4, "heads": 4, "kv_heads": 2, "vocab_size": 256}
MODELS = {
    "qwen3": Qwen3Moe(**SIZES, head_dim=32, ffn_dim=32, experts=8, active_experts=2),
    # 6 experts cannot be divided among 4 shards.
    "mixtral": Mixtral(**SIZES, ffn_dim=48, experts=6, active_experts=3),
    # With weights large enough that the auxiliary loss is a tenth of the gradient.
    "sequence": Qwen3Moe(
        **SIZES,
        head_dim=32,
        ffn_dim=32,
        experts=8,
        active_experts=2,
        balance="auxiliary_sequence",
        auxiliary_weight=1.0,
    ),
    "batch": Qwen3Moe(
        **SIZES, head_dim=32, ffn_dim=32, experts=8, active_experts=2, balance="auxiliary_batch", auxiliary_weight=1.0
    ),
}
FULL = [pytest.mark.full]
ROWS = [
    ("qwen3", {"tensor": 2}, []),
    ("mixtral", {"shard": 4}, FULL),
    ("qwen3", {"shard": 2, "tensor": 2, "pipeline": 2, "schedule": "zbv"}, FULL),
    ("qwen3", {"tensor": 2, "sequence_parallel": False}, FULL),
    ("qwen3", {"replicate": 2}, FULL),
    ("qwen3", {"replicate": 2, "shard": 2, "microbatch": 1}, FULL),
    ("qwen3", {"context": 2, "shard": 2}, FULL),
    ("qwen3", {"replicate": 2, "context": 2, "tensor": 2}, FULL),
    ("qwen3", {"pipeline": 2, "schedule": "interleaved_1f1b"}, FULL),
    ("qwen3", {"pipeline": 2, "shard": 2, "schedule": "interleaved_zero_bubble"}, FULL),
    ("qwen3", {"pipeline": 2, "schedule": "dualpipe_v"}, FULL),
    ("qwen3", {"pipeline": 2, "context": 2, "tensor": 2, "shard": 2}, FULL),
    # The auxiliary loss weighs the same however a step is divided.
    ("sequence", {"shard": 2, "microbatch": 1}, []),
    ("sequence", {"tensor": 2, "sequence_parallel": False}, FULL),
    ("sequence", {"pipeline": 2, "tensor": 2, "microbatch": 2}, []),
    ("batch", {"context": 2, "tensor": 2, "microbatch": 2}, FULL),
    ("batch", {"replicate": 2, "microbatch": 1}, FULL),
    ("mixtral", {"shard": 4, "tensor": 2}, FULL),
    ("mixtral", {"pipeline": 2, "tensor": 2}, FULL),
]


def traced(made, run):
    return parity.trace(made, run, joined(os.environ) or ALONE)


def recipe(folder, model, given):
    common = {key: value for key, value in COMMON.items() if key != "layers"}
    keys = OnLayout(given).keys(common)
    changes = {"kv_heads": keys.pop("kv_heads")} if "kv_heads" in keys else {}
    return tiny.recipe(folder, model=replace(MODELS[model], **changes), **keys)


@pytest.fixture(scope="module")
def reference(pool, tmp_path_factory):
    known = {}

    def of(model, given=None):
        key = model, str(given or {})
        if key not in known:
            made = recipe(tmp_path_factory.mktemp("reference"), model, given or {})
            known[key] = pool.run(1, traced, made, tiny.begin(made))[0]
        return known[key]

    return of


@pytest.mark.parametrize(
    ("model", "given"),
    [pytest.param(model, given, marks=marks, id=f"{model}, {OnLayout(given).label}") for model, given, marks in ROWS],
)
def test_a_layout_trains_as_one_process(pool, reference, tmp_path, model, given):
    made = recipe(tmp_path, model, given)
    found = pool.run(made.world, traced, made, tiny.begin(made))[0]
    difference = compare(reference(model), found)
    assert difference.largest <= BAR, difference
    assert found.loads == reference(model).loads
    assert any(name.endswith("router.weight") for name in found.gradients)
    # The norms of heads, of which each tensor-parallel rank has some: Qwen3's.
    assert any(name.endswith("q_norm.weight") for name in found.gradients) is model.startswith(
        ("qwen3", "sequence", "batch")
    )


@pytest.mark.parametrize("model", ["qwen3", "mixtral"])
def test_no_token_stands_between_two_experts(pool, tmp_path, model):
    """Otherwise equal counts would be luck: rounding moves scores by about 1e-8."""
    made = recipe(tmp_path, model, {})
    assert pool.run(1, least_margin, made, tiny.begin(made))[0] > 1e-7


def least_margin(made, run):
    """The least difference, over all tokens of a run, of the last chosen expert's score and the next one's."""
    margins = []

    @torch.no_grad()
    def choose(router, tokens, weight):
        scores = torch.nn.functional.linear(tokens, weight).softmax(-1) + router.bias
        best = scores.topk(router.active + 1, dim=-1).values
        margins.append(float((best[:, -2] - best[:, -1]).min()))
        with torch.enable_grad():
            return unpatched(router, tokens, weight)

    unpatched = Router.choose
    with patch.object(Router, "choose", choose):
        traced(made, run)
    return min(margins)
