"""The rules of models' schemas, and the models in conf/model."""

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from tests import tiny
from tests.model.published import NAMES, load
from tests.refusals import refusal
from titanlab.costs import Layout, RoutedExperts
from titanlab.errors import ConfigError
from titanlab.options import schema_of
from titanlab.ranges import plain
from titanlab.recipe import schema_node
from titanlab.recipe.recipe_rules import setting
from titanlab.techniques.model.llama_schema import BALANCES, Llama, Qwen3, Qwen3Moe

INF, NAN = float("inf"), float("nan")
# A model and a change of it; how the line begins.
WRONG = [
    ("debug", {"dim": 0}, "model.dim=0: must be at least 1; try 256"),
    ("debug", {"dim": 65}, "model.dim=65: must be even: heads are turned in pairs; try 256"),
    ("debug", {"heads": 3}, "model.heads=3: must divide dim=64 into heads of even width; try 2 or 4"),
    ("debug", {"heads": 64}, "model.heads=64: must divide dim=64 into heads of even width; try 32"),
    ("debug", {"kv_heads": 3}, "model.kv_heads=3: must divide 4 query heads; try 2 or 4"),
    ("debug", {"kv_heads": 8}, "model.kv_heads=8: must divide 4 query heads; try 4"),
    ("debug", {"kv_heads": 0}, "model.kv_heads=0: must be at least 1; try 4 (no sharing)"),
    ("debug", {"ffn_dim": 0}, "model.ffn_dim=0: must be at least 1; try 256"),
    ("debug", {"vocab_size": 1}, "model.vocab_size=1: must be at least 2"),
    ("debug", {"norm_eps": 0.0}, "model.norm_eps=0.0: must lie between 0 and 1; try 1e-5"),
    ("debug", {"rope_theta": 1.0}, "model.rope_theta=1.0: must be above 1"),
    ("debug", {"rope_factor": 0.5}, "model.rope_factor=0.5: must be at least 1; try 1 (off)"),
    ("debug", {"rope_low_freq_factor": 0.0}, "model.rope_low_freq_factor=0.0: must be above 0; try 1"),
    ("debug", {"rope_high_freq_factor": 1.0}, "model.rope_high_freq_factor=1.0: must be above rope_low_freq_factor=1; try 4"),
    ("debug", {"attention": "fast"}, "model.attention=fast: no such choice; choose one of auto, flash, cudnn, efficient, math"),
    ("qwen3_debug", {"head_dim": 0}, "model.head_dim=0: must be an even number of at least 2: heads are turned in pairs; try 128"),
    ("qwen3_moe_debug", {"head_dim": 7}, "model.head_dim=7: must be an even number of at least 2"),
    ("qwen3_moe_debug", {"experts": 1}, "model.experts=1: must be at least 2: one expert is a dense feed-forward; try 8, or a dense model"),
    ("mixtral_debug", {"active_experts": 5}, "model.active_experts=5: is more than the 4 experts; try 4"),
    ("qwen3_moe_debug", {"active_experts": 1}, "model.active_experts=1: must be at least 2: the weight of a single"),
    ("mixtral_debug", {"balance": "even"}, f"model.balance=even: no such choice; choose one of {', '.join(BALANCES)}"),
    ("mixtral_debug", {"bias_rate": -0.1}, "model.bias_rate=-0.1: must not be negative; try 0.001"),
    ("mixtral_debug", {"bias_rate": NAN}, "model.bias_rate=nan: must not be negative"),
    ("mixtral_debug", {"auxiliary_weight": INF}, "model.auxiliary_weight=inf: must be a finite number"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "message"), WRONG)
def test_a_broken_rule_is_told_with_its_cure(name, change, message):
    assert refusal(load, name, **change).startswith(message)


def test_what_may_be_is_taken():
    # Heads need not divide the stream.
    assert load("qwen3_debug", heads=6, kv_heads=3, head_dim=10).attention_dim == 60
    for count, active in ((2, 2), (8, 2), (8, 8)):
        assert load("mixtral_debug", experts=count, active_experts=active).routed.active == active
    options = {"balance": "auxiliary_batch", "bias_rate": 0.0, "auxiliary_weight": 0.25}
    model = load("mixtral_debug", experts=6, active_experts=3, **options)
    assert model.account().experts == model.routed == RoutedExperts(count=6, active=3, **options)


@pytest.mark.parametrize(
    ("balance", "layout", "line"),
    [
        ("auxiliary_sequence", {"context": 2}, "counts by sequence, and context=2 splits each sequence"),
        ("auxiliary_sequence", {"shard": 2, "tensor": 2, "expert": 2}, "each process routes a part of the tokens"),
        ("auxiliary_sequence", {"shard": 2, "expert": 2}, None),
        ("auxiliary_sequence", {"tensor": 2}, None),
        ("auxiliary_batch", {"context": 2}, None),
        ("bias", {"shard": 2, "tensor": 2, "expert": 2}, None),
    ],
)
def test_sequences_are_counted_where_a_process_has_whole_ones(balance, layout, line):
    model = load("mixtral_debug", balance=balance, vocab_size=256)
    made = replace(setting(tiny.recipe("runs", model=model)), layout=Layout(**layout))
    if line is None:
        model.check(made)
        return
    with pytest.raises(ConfigError, match="^model.balance=auxiliary_sequence: ") as refused:
        model.check(made)
    assert line in str(refused.value)


@given(dim=st.integers(1, 500), heads=st.integers(1, 500), kv_heads=st.integers(1, 500))
def test_cures_work(dim, heads, kv_heads):
    """Following the last word of each cure leads to a model that is accepted."""
    values = {"dim": dim, "heads": heads, "kv_heads": kv_heads}
    for _ in range(4):
        try:
            Llama(layers=1, ffn_dim=8, vocab_size=8, **values)
        except ConfigError as error:
            field = error.key.removeprefix("model.")
            suggestion = int(error.cure.removeprefix("try ").split(" or ")[0])
            assert suggestion != values[field]
            values[field] = suggestion
        else:
            return
    pytest.fail(f"no end of errors from {dim}, {heads}, {kv_heads}")


@pytest.mark.parametrize("name", NAMES)
def test_models_are_valid_and_convert_through_omegaconf(name):
    config = load(name)
    structured = OmegaConf.merge(schema_node(schema_of("model", config.kind)), plain(config))
    assert OmegaConf.to_object(structured) == config


def test_what_the_families_have():
    """Sharing of heads, scaled frequencies and tied embeddings, where the releases have them."""
    ours = {name: load(name) for name in NAMES}
    small = {"llama3_2_1b", "llama3_2_3b"}
    assert {n for n, c in ours.items() if c.tied_embeddings} == {*small, "qwen3_0_6b", "qwen3_1_7b", "qwen3_4b"}
    factors = {**dict.fromkeys(("llama3_1_8b", "llama3_1_70b", "llama3_1_405b"), 8), **dict.fromkeys(small, 32)}
    assert {n: c.rope_factor for n, c in ours.items() if c.rope_factor != 1} == factors
    assert {n for n, c in ours.items() if c.kv_heads == c.heads} == {"llama2_7b", "llama2_13b"}
    assert all(c.rope_theta == 500_000 and c.vocab_size == 128_256 for n, c in ours.items() if n.startswith("llama3"))
    assert all(c.rope_theta == 10_000 and c.vocab_size == 32_000 for n, c in ours.items() if n.startswith("llama2"))


def test_experts_leave_the_defaults_of_their_family():
    """The order of base classes decides which default a field has."""
    dense, routed = ({each.name: each.default for each in fields(kind)} for kind in (Qwen3, Qwen3Moe))
    assert dense.pop("kind") != routed["kind"]
    assert {name: routed[name] for name in dense} == dense
