"""config.json and our schemas say the same model, both ways, for every family; every tensor finds its place."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.model.published import NAMES, load
from tests.refusals import refusal
from tests.weights.huggingface import made
from titanlab.errors import ConfigError
from titanlab.options import Option, discover
from titanlab.techniques.model.llama_schema import Llama, Mixtral, Qwen3, Qwen3Moe
from titanlab.train import weights
from titanlab.train.weights import family_for

LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA_3 |= {"original_max_position_embeddings": 8192}
# As released, by what decides what is computed.
PUBLISHED = {
    "llama2_7b": {
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "rms_norm_eps": 1e-05, "rope_scaling": None, "tie_word_embeddings": False,
        "vocab_size": 32000, "pretraining_tp": 1, "max_position_embeddings": 4096,
    },
    "llama3_1_70b": {
        "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "mlp_bias": False,
        "rope_scaling": LLAMA_3, "tie_word_embeddings": False, "vocab_size": 128256,
    },
    "llama3_2_1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "head_dim": 64, "tie_word_embeddings": True,
        "rope_parameters": {**LLAMA_3, "factor": 32.0, "rope_theta": 500000.0}, "vocab_size": 128256,
    },
    "qwen3_0_6b": {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-06, "rope_theta": 1000000, "rope_scaling": None,
        "tie_word_embeddings": True, "vocab_size": 151936, "attention_bias": False, "max_window_layers": 28,
        "sliding_window": None, "use_sliding_window": False,
    },
    "qwen3_moe_30b_a3b": {
        "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0, "rope_scaling": None, "vocab_size": 151936, "tie_word_embeddings": False,
        "attention_bias": False, "max_window_layers": 48, "sliding_window": None, "use_sliding_window": False,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True, "num_experts": 128,
        "num_experts_per_tok": 8, "router_aux_loss_coef": 0.001,
    },
    "mixtral_8x7b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "vocab_size": 32000,
        "tie_word_embeddings": False, "sliding_window": None, "num_local_experts": 8, "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.02,
    },
}  # fmt: skip
HEADS = {Llama: {"wq", "wk"}, Mixtral: {"wq", "wk"}, Qwen3: {"wq", "wk", "q_norm", "k_norm"}}
HEADS[Qwen3Moe] = HEADS[Qwen3]


@pytest.mark.parametrize("name", NAMES)
def test_every_model_maps_both_ways(name):
    model = load(name)
    family = model.hugging_face()
    config = family.to_hf(model, context=4096)
    again = family.from_hf(config)
    assert again == model
    assert family.difference(again, model) == ""
    assert family_for(config) == family
    # Every parameter has a name of its own there, and only queries and keys have other rows.
    theirs = family.tensors(model)
    assert list(theirs) == list(model.account().parameters)
    assert len({name for each in theirs.values() for name in each.names}) == sum(
        len(each.names) for each in theirs.values()
    )
    assert {name.split(".")[-2] for name, each in theirs.items() if each.head} == HEADS[type(model)]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_released_config_is_our_model(name):
    model = load(name)
    released = {"hidden_act": "silu", **PUBLISHED[name]}
    assert model.hugging_face().from_hf(released) == model
    written = model.hugging_face().to_hf(model, context=4096)
    # What is written has the values that were released; RoPE stands as transformers 4 reads it.
    left_out = {"rope_parameters", "head_dim", "pretraining_tp", "attention_dropout", "max_position_embeddings"}
    if model.account().experts is not None:
        assert {key: written[key] for key in released.keys() - left_out} == {
            key: value for key, value in released.items() if key not in left_out
        }


@pytest.mark.parametrize("name", made.FAMILIES)
def test_names_are_those_of_transformers(name):
    config = made.FAMILIES[name]
    family = family_for(config)
    model = family.from_hf(config)
    shapes = model.account().parameters
    found = {
        theirs: place.shape_there(shapes[ours])
        for ours, place in family.tensors(model).items()
        for theirs in place.names
    }
    assert found == made.names(config)


@pytest.mark.parametrize(
    ("name", "change", "difference"),
    [
        ("llama3_8b", {"attention": "math"}, ""),
        # Without scaling nothing is computed of it.
        ("llama3_8b", {"rope_original_context": 4096}, ""),
        ("llama3_1_70b", {"rope_original_context": 4096}, "rope_original_context"),
        ("llama3_8b", {"rope_theta": 1e4}, "rope_theta"),
        ("llama3_8b", {"norm_eps": 1e-6}, "norm_eps"),
        ("llama3_8b", {"rope_factor": 8.0}, "rope_factor"),
        ("llama3_8b", {"tied_embeddings": True}, "tied_embeddings"),
        ("llama3_8b", {"layers": 3}, "layers"),
        ("qwen3_debug", {"head_dim": 16}, "head_dim"),
        ("mixtral_debug", {"active_experts": 3}, "active_experts"),
        ("qwen3_moe_debug", {"experts": 256}, "experts"),
    ],
)
def test_what_makes_two_models_different(name, change, difference):
    model = load(name)
    assert model.hugging_face().difference(model, replace(model, **change)) == difference


@pytest.mark.parametrize(
    ("config", "change", "line"),
    [
        (made.SMALL, {"attention_bias": True}, "attention_bias=true: is not supported"),
        (made.SMALL, {"mlp_bias": True}, "mlp_bias=true: is not supported; import a model with mlp_bias=false"),
        (made.SMALL, {"hidden_act": "gelu"}, "hidden_act=gelu: is not supported; import a model with hidden_act=silu"),
        (made.SMALL, {"quantization_config": {"bits": 4}}, "quantization_config="),
        (made.SMALL, {"head_dim": 32}, "head_dim=32: heads are hidden_size / num_attention_heads = 64 / 4 wide here"),
        (made.SMALL, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type=linear: is a scaling that is not supported"),
        (made.SMALL, {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor=null: must be a number"),
        (made.SMALL, {"rope_scaling": "llama3"}, "rope_scaling=llama3: must be an object"),
        (made.SMALL, {"hidden_size": ...}, "hidden_size=null: must be a whole number"),
        (made.SMALL, {"hidden_size": "64"}, "hidden_size=64: must be a whole number"),
        (made.SMALL, {"num_hidden_layers": 0}, "num_hidden_layers=0: must be a whole number of at least 1"),
        (made.SMALL, {"rms_norm_eps": "small"}, "rms_norm_eps=small: must be a number"),
        (made.SMALL, {"num_hidden_layers": 2.0}, "num_hidden_layers=2.0: must be a whole number"),
        (made.SMALL, {"sliding_window": 4096}, "sliding_window=4096: is not supported"),
        (made.SMALL, {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5: turns only part of a head"),
        (made.SMALL, {"rope_scaling": {**LLAMA_3, "original_max_position_embeddings": 64.5}}, "original_max_position_embeddings=64.5: must be a whole"),
        (made.QWEN_3, {"use_sliding_window": True}, "use_sliding_window=true: is not supported"),
        (made.QWEN_3, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types=sliding_attention: is not supported"),
        (made.QWEN_3, {"head_dim": "wide"}, "head_dim=wide: must be a whole number of at least 1"),
        (made.QWEN_3, {"head_dim": 25}, "head_dim=25: must be an even number"),
        (made.QWEN_3, {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type=yarn: is a scaling that is not supported"),
        (made.QWEN_3_MOE, {"decoder_sparse_step": 2}, "decoder_sparse_step=2: is not supported"),
        (made.QWEN_3_MOE, {"mlp_only_layers": [0]}, "mlp_only_layers=[0]: is not supported"),
        (made.QWEN_3_MOE, {"norm_topk_prob": ...}, "norm_topk_prob=false: is not supported"),
        (made.QWEN_3_MOE, {"shared_expert_intermediate_size": 96}, "shared_expert_intermediate_size=96: is not supported"),
        (made.QWEN_3_MOE, {"num_experts": ...}, "num_local_experts=null: must be a whole number of at least 1"),
        (made.QWEN_3_MOE, {"num_experts_per_tok": 9}, "num_experts_per_tok=9: is more than the 8 experts"),
        (made.MIXTRAL, {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1: is not supported"),
        (made.MIXTRAL, {"num_local_experts": 1, "num_experts_per_tok": 1}, "model.experts=1: must be at least 2"),
    ],
)  # fmt: skip
def test_what_is_not_computed_is_refused(config, change, line):
    config = {name: value for name, value in {**config, **change}.items() if value is not ...}
    with pytest.raises(ConfigError) as refused:
        family_for(config).from_hf(config)
    assert line in str(refused.value)


def test_layers_that_all_see_everything_are_taken():
    family = family_for(made.QWEN_3)
    assert family.from_hf({**made.QWEN_3, "layer_types": ["full_attention"] * 3}) == family.from_hf(made.QWEN_3)


@pytest.mark.parametrize(
    ("given", "key", "rule"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "rope_scaling": LLAMA_3},
         "rope_parameters.rope_type=default", "disagrees with rope_scaling, which has rope_type=llama3"),
        ({"rope_parameters": LLAMA_3, "rope_scaling": {**LLAMA_3, "factor": 32.0}},
         "rope_parameters.factor=8.0", "disagrees with rope_scaling, which has factor=32.0"),
        ({"rope_parameters": {**LLAMA_3, "rope_theta": 5e5}, "rope_scaling": {**LLAMA_3, "rope_theta": 1e4}},
         "rope_parameters.rope_theta=500000.0", "which has rope_theta=10000.0"),
        ({"rope_parameters": {**LLAMA_3, "rope_theta": 5e5}, "rope_theta": 1e4},
         "rope_parameters.rope_theta=500000.0", "disagrees with rope_theta=10000.0 beside it"),
        ({"rope_scaling": LLAMA_3, "original_max_position_embeddings": 4096},
         "rope_scaling.original_max_position_embeddings=8192", "beside it"),
    ],
)  # fmt: skip
def test_two_ropes_that_disagree_are_refused(given, key, rule):
    config = {name: value for name, value in made.LLAMA_3_2.items() if not name.startswith("rope")}
    with pytest.raises(ConfigError) as refused:
        Llama.hugging_face().from_hf({**config, **given})
    assert str(refused.value).startswith(f"config.json:{key}: ")
    assert rule in str(refused.value)


SUPPORTED = "LlamaForCausalLM, MixtralForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM"


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (["MistralForCausalLM"], "MistralForCausalLM"),
        (["MistralModel"], "MistralModel"),
        ([], "null"),
        ([1], "1"),
        # Whoever reads the first would leave the second out.
        (["LlamaForCausalLM", "B"], "['LlamaForCausalLM', 'B']"),
        # Not hashable.
        ([["LlamaForCausalLM"]], "['LlamaForCausalLM']"),
        ({"LlamaForCausalLM": 1}, "{'LlamaForCausalLM': 1}"),
    ],
)
def test_other_architectures_are_refused(given, shown):
    told = refusal(family_for, {"architectures": given})
    rule = "is not a supported architecture"
    assert told == f"config.json:architectures={shown}: {rule}; supported: {SUPPORTED}"


def test_models_of_other_packages_are_found_and_those_without_a_form_in_transformers_left_out(monkeypatch):
    class Family:
        architectures = ("MineForCausalLM", "MineForever")

    family = Family()
    schemas = {
        "mine": type("Mine", (), {"hugging_face": classmethod(lambda cls: family)}),
        "bare": type("Bare", (), {"hugging_face": classmethod(lambda cls: None)}),
    }
    more = {kind: Option(group="model", kind=kind, schema=schema) for kind, schema in schemas.items()}
    known = discover()
    monkeypatch.setattr(weights, "discover", lambda: {**known, "model": {**known["model"], **more}})
    assert family_for({"architectures": ["MineForever"]}) is family
    # As a person might write it.
    assert family_for({"architectures": "LlamaForCausalLM"}) == Llama.hugging_face()
    with pytest.raises(ConfigError, match="supported: LlamaForCausalLM, MineForCausalLM, MineForever, Mixtral"):
        family_for({"architectures": ["BareForCausalLM"]})
    with pytest.raises(ConfigError, match=r"^config\.json:architectures=null: "):
        family_for({})


# Keys that are missing, and the two styles of frequencies.
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
MODELS = {name: load(name) for name in ("qwen3_moe_debug", "mixtral_debug")}


def read(**changes):
    config = {**PLAIN, **changes}
    return FAMILY.from_hf({name: value for name, value in config.items() if value is not ...})


def config_of(name, **changes):
    """config.json of a model with experts, changed."""
    config = {**MODELS[name].hugging_face().to_hf(MODELS[name], context=64), **changes}
    return {key: value for key, value in config.items() if value is not ...}


def read_experts(name, **changes):
    return MODELS[name].hugging_face().from_hf(config_of(name, **changes))


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


def test_what_is_switched_off_is_accepted():
    assert read(attention_bias=False, mlp_bias=None, hidden_act="silu", sliding_window=None) == SMALL


EXPERTS = MODELS["qwen3_moe_debug"]


def test_scaled_frequencies_are_for_a_longer_context():
    other = replace(LONG, rope_original_context=128)
    assert [FAMILY.stretched_context(each) for each in (SMALL, LONG, other)] == [0, 512, 1024]


def test_the_width_of_an_expert_is_not_that_of_a_dense_feed_forward():
    model, config = EXPERTS, config_of("qwen3_moe_debug")
    assert config["moe_intermediate_size"] == model.ffn_dim
    assert config["intermediate_size"] == model.ffn_dim * model.active_experts
    assert model.hugging_face().from_hf({**config, "intermediate_size": 12345}).ffn_dim == model.ffn_dim


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
