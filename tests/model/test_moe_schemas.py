"""The rules of models with experts, and what they declare."""

import pytest

from tests.model.published import load
from titanlab.costs import training_flops_per_token
from titanlab.errors import ConfigError
from titanlab.train.conformance import faults

# Parameters that compute a token, as published: "A3B", "A22B", 12.9 B and 39 B.
ACTIVE = {
    "qwen3_moe_30b_a3b": 3_353_032_704,
    "qwen3_moe_235b_a22b": 22_190_763_520,
    "mixtral_8x7b": 12_879_925_248,
    "mixtral_8x22b": 39_152_031_744,
}


@pytest.mark.parametrize(
    ("name", "change", "line"),
    [
        ("qwen3_moe_debug", {"experts": 1}, "model.experts=1: must be at least 2: one expert is a dense feed-forward"),
        ("mixtral_debug", {"experts": 0}, "model.experts=0: must be at least 2"),
        ("mixtral_debug", {"active_experts": 5}, "model.active_experts=5: is more than the 4 experts; try 4"),
        (
            "qwen3_moe_debug",
            {"active_experts": 1},
            "model.active_experts=1: must be at least 2: the weight of a single",
        ),
        ("qwen3_moe_debug", {"head_dim": 7}, "model.head_dim=7: must be an even number"),
    ],
)
def test_a_broken_rule_is_one_line(name, change, line):
    with pytest.raises(ConfigError) as refused:
        load(name, **change)
    assert line in str(refused.value)


@pytest.mark.parametrize("name", ["qwen3_moe_debug", "mixtral_debug"])
def test_a_model_agrees_with_its_account(name):
    assert faults(load(name)) == []
    assert faults(load(name, active_experts=3)) == []


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_are_those_of_the_chosen_experts(name):
    account = load(name).account()
    assert account.active_count == ACTIVE[name]
    attention = 12 * account.layers * account.heads * account.head_dim * 4096
    assert training_flops_per_token(account, seq_len=4096) == 6 * (ACTIVE[name] - account.embedding_count) + attention
