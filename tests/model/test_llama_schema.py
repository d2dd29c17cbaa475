"""The rules of Llama's schema, and the models in conf/model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from tests.model.published import NAMES, load
from titanlab.errors import ConfigError
from titanlab.options import schema_of
from titanlab.ranges import plain
from titanlab.recipe import schema_node
from titanlab.techniques.model.llama_schema import Llama


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": 0}, "model.dim=0: must be at least 1; try 256"),
        ({"dim": 65}, "model.dim=65: must be even: heads are turned in pairs; try 256"),
        ({"layers": -1}, "model.layers=-1: must be at least 1; try 6"),
        ({"heads": 3}, "model.heads=3: must divide dim=64 into heads of even width; try 2 or 4"),
        ({"heads": 64}, "model.heads=64: must divide dim=64 into heads of even width; try 32"),
        ({"heads": 0}, "model.heads=0: must be at least 1; try 8"),
        ({"kv_heads": 3}, "model.kv_heads=3: must divide 4 query heads; try 2 or 4"),
        ({"kv_heads": 8}, "model.kv_heads=8: must divide 4 query heads; try 4"),
        ({"kv_heads": 0}, "model.kv_heads=0: must be at least 1; try 4 (no sharing)"),
        ({"ffn_dim": 0}, "model.ffn_dim=0: must be at least 1; try 256"),
        ({"vocab_size": 1}, "model.vocab_size=1: must be at least 2"),
        ({"norm_eps": 0.0}, "model.norm_eps=0.0: must lie between 0 and 1; try 1e-5"),
        ({"norm_eps": float("nan")}, "model.norm_eps=nan: must lie between 0 and 1"),
        ({"rope_theta": 1.0}, "model.rope_theta=1.0: must be above 1"),
        ({"rope_theta": float("inf")}, "model.rope_theta=inf: must be above 1"),
        ({"rope_factor": 0.5}, "model.rope_factor=0.5: must be at least 1; try 1 (off)"),
        ({"rope_low_freq_factor": 0.0}, "model.rope_low_freq_factor=0.0: must be above 0; try 1"),
        (
            {"rope_high_freq_factor": 1.0},
            "model.rope_high_freq_factor=1.0: must be above rope_low_freq_factor=1; try 4",
        ),
        ({"rope_original_context": 0}, "model.rope_original_context=0: must be at least 1; try 8192"),
        (
            {"attention": "fast"},
            "model.attention=fast: no such attention kernel; choose one of auto, flash, cudnn, efficient, math",
        ),
    ],
)
def test_a_broken_rule_is_told_with_its_cure(change, message):
    with pytest.raises(ConfigError) as raised:
        load("debug", **change)
    assert str(raised.value).startswith(message)


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
    assert {n for n, c in ours.items() if c.tied_embeddings} == {
        "llama3_2_1b",
        "llama3_2_3b",
        "qwen3_0_6b",
        "qwen3_1_7b",
        "qwen3_4b",
    }
    assert {n: c.rope_factor for n, c in ours.items() if c.rope_factor != 1} == {
        "llama3_1_8b": 8,
        "llama3_1_70b": 8,
        "llama3_1_405b": 8,
        "llama3_2_1b": 32,
        "llama3_2_3b": 32,
    }
    assert {n for n, c in ours.items() if c.kv_heads == c.heads} == {"llama2_7b", "llama2_13b"}
    assert all(c.rope_theta == 500_000 and c.vocab_size == 128_256 for n, c in ours.items() if n.startswith("llama3"))
    assert all(c.rope_theta == 10_000 and c.vocab_size == 32_000 for n, c in ours.items() if n.startswith("llama2"))
