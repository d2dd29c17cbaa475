"""Models in the form of transformers: what a config.json means, and what is not computed here."""

import re
from dataclasses import replace

import pytest

from tests.model.published import load
from titanlab.errors import ConfigError
from titanlab.techniques.model.contract import Foreign
from titanlab.techniques.model.llama_schema import Llama

FAMILY = Llama.hugging_face()
SMALL = Llama(dim=64, layers=2, heads=4, kv_heads=2, ffn_dim=96, vocab_size=128, norm_eps=1e-5, rope_theta=10000.0)
PLAIN = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 128,
    "rms_norm_eps": 1e-5,
}
STRETCHED = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
SCALED = {"rope_factor": 8.0, "rope_low_freq_factor": 1.0, "rope_high_freq_factor": 4.0, "rope_original_context": 64}
LONG = replace(SMALL, rope_theta=500000.0, **SCALED)
TIED = replace(SMALL, tied_embeddings=True)
MODELS = {name: load(name) for name in ("qwen3_moe_debug", "mixtral_debug")}
# The keys of the numbers of experts.
COUNT = {"qwen3_moe_debug": "num_experts", "mixtral_debug": "num_local_experts"}


def read(**changes):
    config = {**PLAIN, **changes}
    return FAMILY.from_hf({name: value for name, value in config.items() if value is not ...})


def config_of(name, **changes):
    """config.json of a model with experts, changed."""
    config = {**MODELS[name].hugging_face().to_hf(MODELS[name], context=64), **changes}
    return {key: value for key, value in config.items() if value is not ...}


def read_experts(name, **changes):
    return MODELS[name].hugging_face().from_hf(config_of(name, **changes))


@pytest.mark.parametrize("model", [SMALL, LONG, TIED])
def test_what_is_written_is_read(model):
    config = FAMILY.to_hf(model, context=512)
    assert FAMILY.from_hf(config) == model
    assert (config["max_position_embeddings"], config["model_type"]) == (512, "llama")
    assert config["architectures"] == ["LlamaForCausalLM"]


def test_missing_keys_have_the_defaults_of_transformers():
    model = read(num_key_value_heads=..., rms_norm_eps=...)
    assert (model.kv_heads, model.norm_eps, model.rope_theta, model.rope_factor) == (4, 1e-6, 10000.0, 1.0)
    assert not model.tied_embeddings
    # As null they are missing too.
    assert read(num_key_value_heads=None, rms_norm_eps=None, rope_theta=None, head_dim=None) == model


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    "rope", [{}, {"type": None}, {"rope_type": None, "type": None}, {"rope_type": None, "factor": None}]
)
def test_a_rope_without_a_type_is_the_default(key, rope):
    assert read(**{key: rope}) == read(rope_scaling=None)


def test_the_older_name_of_a_type_counts_where_the_newer_is_null():
    scaling = {"rope_type": None, "type": "llama3", **STRETCHED}
    assert read(rope_scaling=scaling) == read(rope_scaling={"rope_type": "llama3", **STRETCHED})


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **STRETCHED}},
        {"rope_theta": 500000.0, "rope_scaling": {"type": "llama3", **STRETCHED}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **STRETCHED}},
        {"rope_parameters": {"rope_type": "llama3", **STRETCHED}, "rope_theta": 500000.0},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": None, **STRETCHED}, "rope_theta": 500000.0},
        {
            "rope_theta": 500000.0,
            "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **STRETCHED},
            "rope_scaling": {"type": "llama3", **STRETCHED},
        },
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "partial_rotary_factor": None, **STRETCHED}},
    ],
)
def test_both_styles_of_scaled_frequencies_are_one_model(rope):
    assert read(**rope) == LONG


@pytest.mark.parametrize(
    "rope", [{}, {"rope_scaling": None}, {"rope_scaling": {}}, {"rope_parameters": {"rope_type": "default"}}]
)
def test_without_scaling_there_is_no_factor(rope):
    assert read(**rope) == SMALL
    assert FAMILY.stretched_context(read(**rope)) == 0


MOE, MIXTRAL = "qwen3_moe_debug", "mixtral_debug"
WRONG = [
    ("", {"hidden_size": ...}, "hidden_size=null: must be a whole number of at least 1; restore the file"),
    ("", {"vocab_size": "128"}, "vocab_size=128: must be a whole number"),
    ("", {"num_hidden_layers": True}, "num_hidden_layers=true: must be a whole number"),
    ("", {"num_hidden_layers": 2.0}, "num_hidden_layers=2.0: must be a whole number"),
    ("", {"intermediate_size": 0}, "intermediate_size=0: must be a whole number"),
    ("", {"rms_norm_eps": "small"}, "rms_norm_eps=small: must be a number"),
    ("", {"rms_norm_eps": False}, "rms_norm_eps=false: must be a number"),
    ("", {"head_dim": 32}, "head_dim=32: heads are hidden_size / num_attention_heads = 64 / 4 wide here"),
    ("", {"attention_bias": True}, "attention_bias=true: is not computed here; import a model with attention_bias=false"),
    ("", {"hidden_act": "gelu"}, "hidden_act=gelu: is not computed here; import a model with hidden_act=silu"),
    ("", {"sliding_window": 4096}, "sliding_window=4096: is not computed here; import a model with sliding_window=null"),
    ("", {"quantization_config": {}}, "quantization_config={}: is not computed here"),
    ("", {"rope_scaling": "llama3"}, "rope_scaling=llama3: must be an object; restore the file"),
    ("", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type=linear: is a scaling that is not computed"),
    ("", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5: turns only part of a head"),
    ("", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor=null: must be a number"),
    ("", {"rope_scaling": {"rope_type": "llama3", **STRETCHED, "original_max_position_embeddings": 64.5}}, "original_max_position_embeddings=64.5: must be a whole number"),
    ("", {"rope_parameters": {"rope_theta": 5.0}, "rope_theta": 6.0}, "rope_parameters.rope_theta=5.0: disagrees with rope_theta=6.0 beside it; leave out the one"),
    ("", {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"rope_type": "llama3", **STRETCHED}}, "rope_parameters.rope_type=default: disagrees with rope_scaling, which has rope_type=llama3"),
    ("", {"rope_parameters": {"rope_type": "llama3", **STRETCHED}, "rope_scaling": {"type": "llama3"}}, "rope_parameters.factor=8.0: disagrees with rope_scaling, which has factor=null"),
    (MOE, {"num_experts": ...}, "num_local_experts=null: must be a whole number"),
    (MOE, {"num_experts_per_tok": ...}, "num_experts_per_tok=null: must be a whole number"),
    (MOE, {"num_experts_per_tok": 99}, "num_experts_per_tok=99: is more than the "),
    (MOE, {"decoder_sparse_step": 2}, "decoder_sparse_step=2: is not computed here"),
    (MOE, {"mlp_only_layers": [0]}, "mlp_only_layers=[0]: is not computed here"),
    (MOE, {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size=64: is not"),
    # A file without it means false, and so does null.
    *((MOE, {"norm_topk_prob": none}, "norm_topk_prob=false: is not computed here; import a model with norm_topk_prob=true") for none in (None, ...)),
    (MIXTRAL, {"num_local_experts": 0}, "num_local_experts=0: must be a whole number"),
    (MIXTRAL, {"num_experts_per_tok": 5, "num_local_experts": 4}, "num_experts_per_tok=5: is more than the 4 experts"),
    (MIXTRAL, {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1: is not computed here"),
    (MIXTRAL, {"sliding_window": 4096}, "sliding_window=4096: is not computed here"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "line"), WRONG)
def test_what_is_not_computed_or_incomplete_is_told(name, changes, line):
    with pytest.raises(ConfigError) as refused:
        read_experts(name, **changes) if name else read(**changes)
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith(f"config.json:{line}")


def test_what_is_switched_off_is_accepted():
    assert read(attention_bias=False, mlp_bias=None, hidden_act="silu", sliding_window=None) == SMALL


def test_tensors_have_the_order_of_rows_that_transformers_rotates():
    tensors = FAMILY.tensors(SMALL)
    assert list(tensors) == list(SMALL.account().parameters)
    assert tensors["layers.1.attention.wq.weight"] == Foreign(name="model.layers.1.self_attn.q_proj.weight", head=16)
    assert tensors["layers.1.attention.wv.weight"] == Foreign(name="model.layers.1.self_attn.v_proj.weight")
    assert tensors["layers.0.ffn_norm.weight"].name == "model.layers.0.post_attention_layernorm.weight"
    assert [tensors[name].name for name in ("tok_embeddings.weight", "norm.weight", "output.weight")] == [
        *["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    ]
    assert len({each.name for each in tensors.values()}) == len(tensors)


def test_a_tied_head_may_be_in_a_folder_as_a_copy():
    assert "output.weight" not in FAMILY.tensors(TIED)
    assert FAMILY.copies(TIED) == {"lm_head.weight": "model.embed_tokens.weight"}
    assert FAMILY.copies(SMALL) == {}


def test_frequencies_in_files_can_be_computed():
    assert FAMILY.derived.fullmatch("model.layers.31.self_attn.rotary_emb.inv_freq")
    assert not re.fullmatch(FAMILY.derived, "model.layers.x.self_attn.rotary_emb.inv_freq")


EXPERTS = MODELS["qwen3_moe_debug"]


@pytest.mark.parametrize(
    ("model", "changes", "name"),
    [
        (SMALL, {}, ""),
        (SMALL, {"vocab_size": 256}, "vocab_size"),
        (SMALL, {"kv_heads": 4}, "kv_heads"),
        (SMALL, {"norm_eps": 1e-6}, "norm_eps"),
        (SMALL, {"rope_theta": 5.0}, "rope_theta"),
        # It computes nothing as long as there is no scaling.
        (SMALL, {"rope_original_context": 128}, ""),
        (LONG, {"rope_original_context": 128}, "rope_original_context"),
        (SMALL, {"attention": "math"}, ""),
        (EXPERTS, {"active_experts": 3}, "active_experts"),
        (EXPERTS, {"head_dim": 2 * EXPERTS.head_dim}, "head_dim"),
        (MODELS["mixtral_debug"], {"active_experts": 3}, "active_experts"),
        (EXPERTS, {"balance": "none"}, ""),
    ],
)
def test_what_computes_differently_is_named(model, changes, name):
    assert model.hugging_face().difference(model, replace(model, **changes)) == name


def test_scaled_frequencies_are_for_a_longer_context():
    other = replace(LONG, rope_original_context=128)
    assert [FAMILY.stretched_context(each) for each in (SMALL, LONG, other)] == [0, 512, 1024]


@pytest.mark.parametrize("name", MODELS)
def test_what_is_written_of_experts_is_read(name):
    model = MODELS[name]
    config = config_of(name)
    assert (config[COUNT[name]], config["num_experts_per_tok"]) == (model.experts, model.active_experts)
    assert model.hugging_face().difference(model, model.hugging_face().from_hf(config)) == ""


def test_the_width_of_an_expert_is_not_that_of_a_dense_feed_forward():
    model, config = EXPERTS, config_of("qwen3_moe_debug")
    assert config["moe_intermediate_size"] == model.ffn_dim
    assert config["intermediate_size"] == model.ffn_dim * model.active_experts
    assert model.hugging_face().from_hf({**config, "intermediate_size": 12345}).ffn_dim == model.ffn_dim


@pytest.mark.parametrize("name", MODELS)
def test_every_expert_has_tensors_of_its_own(name):
    model = MODELS[name]
    tensors = model.hugging_face().tensors(model)
    assert list(tensors) == list(model.account().parameters)
    place, up = ("mlp", "up_proj") if name.startswith("qwen3") else ("block_sparse_moe", "w3")
    block = f"model.layers.1.{place}"
    assert tensors["layers.1.feed_forward.router.weight"] == Foreign(name=f"{block}.gate.weight")
    assert tensors["layers.1.feed_forward.experts.w3.weight"].stack == tuple(
        f"{block}.experts.{number}.{up}.weight" for number in range(model.experts)
    )
    there = [each for foreign in tensors.values() for each in foreign.names]
    assert len(set(there)) == len(there)


@pytest.mark.parametrize("number", [..., None])
def test_both_names_of_the_number_of_experts_are_read(number):
    changes = {"num_experts": number, "num_local_experts": EXPERTS.experts}
    assert read_experts("qwen3_moe_debug", **changes).experts == EXPERTS.experts


def test_missing_keys_of_a_mixtral_have_the_defaults_of_transformers():
    lacking = dict.fromkeys(("num_local_experts", "num_experts_per_tok", "rms_norm_eps", "rope_theta"), ...)
    model = read_experts("mixtral_debug", **lacking)
    assert (model.experts, model.active_experts) == (8, 2)
    # A Llama's would be 1e-6 and 10,000.
    assert (model.norm_eps, model.rope_theta) == (1e-5, 1_000_000.0)
