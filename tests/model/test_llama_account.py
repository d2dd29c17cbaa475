"""The accounts of models say what the modules are and do, and what is published about them."""

import pytest

from tests.model.published import FLOPS_PER_TOKEN, PARAMETERS, load
from titanlab.costs import training_flops_per_token
from titanlab.train.conformance import faults

SMALL = {
    "debug": {},
    "tied": {"tied_embeddings": True},
    "unshared": {"kv_heads": 4},
    "head norms": {"name": "qwen3_debug"},
    "odd": {"dim": 60, "heads": 6, "kv_heads": 3, "ffn_dim": 77, "vocab_size": 101, "layers": 3},
    "qwen3 experts": {"name": "qwen3_moe_debug"},
    "mixtral experts": {"name": "mixtral_debug", "active_experts": 3},
}


@pytest.mark.parametrize("change", SMALL.values(), ids=SMALL)
def test_a_model_agrees_with_its_account(change):
    """Parameters, initial values, operations with shapes and FLOPs, stages and documents."""
    assert faults(load(**{"name": "debug", **change})) == []


@pytest.mark.parametrize("name", PARAMETERS)
def test_published_parameter_counts(name):
    assert load(name).account().parameter_count == PARAMETERS[name]


# Parameters that compute a token, as published: "A3B", "A22B", 12.9 B and 39 B.
ACTIVE = {
    "qwen3_moe_30b_a3b": 3_353_032_704,
    "qwen3_moe_235b_a22b": 22_190_763_520,
    "mixtral_8x7b": 12_879_925_248,
    "mixtral_8x22b": 39_152_031_744,
}


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_are_those_of_the_chosen_experts(name):
    account = load(name).account()
    assert account.active_count == ACTIVE[name]
    attention = 12 * account.layers * account.heads * account.head_dim * 4096
    assert training_flops_per_token(account, seq_len=4096) == 6 * (ACTIVE[name] - account.embedding_count) + attention


@pytest.mark.parametrize(("name", "seq_len"), FLOPS_PER_TOKEN)
def test_published_flops(name, seq_len):
    assert training_flops_per_token(load(name).account(), seq_len=seq_len) == FLOPS_PER_TOKEN[name, seq_len]


def test_initial_values_follow_depth_and_width():
    values = load("llama3_8b").initial_values()
    assert values["norm.weight"].kind == values["layers.31.ffn_norm.weight"].kind == "ones"
    assert values["tok_embeddings.weight"].std == values["layers.0.feed_forward.w3.weight"].std == 0.02
    assert values["layers.5.attention.wo.weight"].std == pytest.approx(0.02 / 8)
    assert values["layers.5.feed_forward.w2.weight"].std == pytest.approx(0.02 / 8)
    assert values["output.weight"].std == pytest.approx(0.5 / 64)
    tied = load("llama3_2_1b").initial_values()
    assert tied["tok_embeddings.weight"].std == pytest.approx(0.5 / 2048**0.5)
