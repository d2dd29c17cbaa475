"""config.json and our schema say the same model, both ways, for every dense Qwen3."""

from dataclasses import replace

import pytest

from tests.model.published import NAMES, load
from tests.weights.huggingface import made
from titanlab.errors import ConfigError
from titanlab.techniques.model.llama_schema import Qwen3
from titanlab.train.hub_folders import family_for

qwen3_hf = Qwen3.hugging_face()
# As released, by what decides what is computed.
PUBLISHED = {
    "qwen3_0_6b": {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-06, "rope_theta": 1000000, "rope_scaling": None,
        "tie_word_embeddings": True, "vocab_size": 151936, "attention_bias": False, "max_window_layers": 28,
        "sliding_window": None, "use_sliding_window": False, "hidden_act": "silu",
    },
    "qwen3_32b": {
        "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-06, "rope_theta": 1000000, "rope_scaling": None,
        "tie_word_embeddings": False, "vocab_size": 151936, "attention_bias": False, "max_window_layers": 64,
        "sliding_window": None, "use_sliding_window": False, "hidden_act": "silu",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("qwen3") and "moe" not in name])
def test_every_qwen3_maps_both_ways(name):
    model = load(name)
    config = qwen3_hf.to_hf(model, context=4096)
    again = qwen3_hf.from_hf(config)
    assert again == model
    assert qwen3_hf.difference(again, model) == ""
    assert family_for(config) == qwen3_hf == model.hugging_face()
    theirs = qwen3_hf.tensors(model)
    assert list(theirs) == list(model.account().parameters)
    assert {name.split(".")[-2] for name, each in theirs.items() if each.head} == {"wq", "wk", "q_norm", "k_norm"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_released_config_is_our_model(name):
    assert qwen3_hf.from_hf(PUBLISHED[name]) == load(name)


def test_names_are_those_of_transformers():
    model = qwen3_hf.from_hf(made.QWEN_3)
    shapes = model.account().parameters
    assert {each.name: shapes[ours] for ours, each in qwen3_hf.tensors(model).items()} == made.names(made.QWEN_3)


def test_the_width_of_heads_makes_two_models_different():
    model = load("qwen3_debug")
    assert qwen3_hf.difference(model, replace(model, head_dim=16)) == "head_dim"
    assert qwen3_hf.difference(model, replace(model, layers=3)) == "layers"


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"use_sliding_window": True}, "use_sliding_window=true: is not computed here"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types=sliding_attention: is not computed"),
        ({"layer_types": "full_attention"}, "layer_types=full_attention: is not computed here"),
        ({"attention_bias": True}, "attention_bias=true: is not computed here"),
        ({"head_dim": "wide"}, "head_dim=wide: must be a whole number of at least 1"),
        ({"head_dim": 25}, "head_dim=25: must be an even number"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type=yarn: is a scaling that is not computed here"),
    ],
)
def test_what_is_not_computed_is_refused(change, line):
    with pytest.raises(ConfigError) as refused:
        qwen3_hf.from_hf({**made.QWEN_3, **change})
    assert line in str(refused.value)


def test_layers_that_all_see_everything_are_taken():
    assert qwen3_hf.from_hf({**made.QWEN_3, "layer_types": ["full_attention"] * 3}) == qwen3_hf.from_hf(made.QWEN_3)
