"""config.json and our schema say the same model, both ways, for every Llama that we know."""

from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from tests.weights.huggingface import made
from titanlab.errors import ConfigError
from titanlab.techniques.model.llama_schema import Llama
from titanlab.train.hub_folders import family_for

llama_hf = Llama.hugging_face()
CONF = Path(__file__).parents[3] / "conf" / "model"
MODELS = sorted(path.stem for path in CONF.glob("*.yaml") if path.stem.startswith(("debug", "llama")))
# As released, by what decides what is computed.
PUBLISHED = {
    "llama2_7b": {
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "rms_norm_eps": 1e-05, "rope_scaling": None, "tie_word_embeddings": False,
        "vocab_size": 32000, "pretraining_tp": 1, "max_position_embeddings": 4096,
    },
    "llama3_8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 500000.0,
        "tie_word_embeddings": False, "vocab_size": 128256, "attention_bias": False, "attention_dropout": 0.0,
    },
    "llama3_1_70b": {
        "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "mlp_bias": False,
        "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "tie_word_embeddings": False, "vocab_size": 128256,
    },
    "llama3_2_1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "head_dim": 64, "tie_word_embeddings": True,
        "rope_parameters": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                            "original_max_position_embeddings": 8192, "rope_theta": 500000.0, "rope_type": "llama3"},
        "vocab_size": 128256,
    },
}  # fmt: skip


def llama(name) -> Llama:
    values = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    del values["defaults"]
    return Llama(**values)


@pytest.mark.parametrize("name", MODELS)
def test_every_llama_maps_both_ways(name):
    model = llama(name)
    config = llama_hf.to_hf(model, context=4096)
    again = llama_hf.from_hf(config)
    assert again == model
    assert llama_hf.difference(again, model) == ""
    assert family_for(config) == llama_hf
    assert model.hugging_face() == llama_hf
    # The style of transformers 5: frequencies in an object of their own.
    newer = {key: value for key, value in config.items() if not key.startswith("rope")}
    scaling = config["rope_scaling"] or {"rope_type": "default"}
    assert llama_hf.from_hf({**newer, "rope_parameters": {"rope_theta": config["rope_theta"], **scaling}}) == model
    # Every parameter has a name of its own there, and only queries and keys have other rows.
    theirs = llama_hf.tensors(model)
    assert list(theirs) == list(model.account().parameters)
    assert len({each.name for each in theirs.values()}) == len(theirs)
    assert {name.split(".")[-2] for name, each in theirs.items() if each.head} == {"wq", "wk"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_released_config_is_our_model(name):
    assert llama_hf.from_hf({**PUBLISHED[name], "hidden_act": "silu"}) == llama(name)


def test_names_are_those_of_transformers():
    for config in (made.LLAMA_2, made.LLAMA_3_1, made.LLAMA_3_2):
        model = llama_hf.from_hf(config)
        shapes = model.account().parameters
        assert {each.name: shapes[ours] for ours, each in llama_hf.tensors(model).items()} == made.names(config)


def test_what_makes_two_models_different():
    model = llama("llama3_8b")
    other = {field.name: getattr(model, field.name) for field in fields(model)}
    assert llama_hf.difference(model, Llama(**{**other, "attention": "math"})) == ""
    assert llama_hf.difference(model, Llama(**{**other, "rope_original_context": 4096})) == ""
    for key, value in {
        "rope_theta": 1e4,
        "norm_eps": 1e-6,
        "rope_factor": 8.0,
        "tied_embeddings": True,
        "layers": 3,
    }.items():
        assert llama_hf.difference(model, Llama(**{**other, key: value})) == key
    scaled = {**other, "rope_factor": 8.0}
    assert (
        llama_hf.difference(Llama(**scaled), Llama(**{**scaled, "rope_original_context": 4096}))
        == "rope_original_context"
    )


WRONG = [
    ({"attention_bias": True}, "attention_bias=true: is not computed here"),
    ({"mlp_bias": True}, "mlp_bias=true: is not computed here; import a model with mlp_bias=false"),
    ({"hidden_act": "gelu"}, "hidden_act=gelu: is not computed here; import a model with hidden_act=silu"),
    ({"quantization_config": {"bits": 4}}, "quantization_config="),
    ({"head_dim": 32}, "head_dim=32: heads are hidden_size / num_attention_heads = 64 / 4 wide here"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type=linear: is a scaling that is not computed here"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type=yarn"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor=null: must be a number"),
    ({"rope_scaling": "llama3"}, "rope_scaling=llama3: must be an object"),
    ({"hidden_size": None}, "hidden_size=null: must be a whole number"),
    ({"hidden_size": "64"}, "hidden_size=64: must be a whole number"),
    ({"num_hidden_layers": 0}, "num_hidden_layers=0: must be a whole number of at least 1"),
    ({"num_hidden_layers": True}, "num_hidden_layers=true: must be a whole number"),
    ({"rms_norm_eps": "small"}, "rms_norm_eps=small: must be a number"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[message for _, message in WRONG])
def test_what_is_not_computed_is_refused(change, message):
    with pytest.raises(ConfigError) as caught:
        llama_hf.from_hf({**made.SMALL, **change})
    assert str(caught.value).startswith(f"config.json:{message}")


LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA_3 |= {"original_max_position_embeddings": 8192}


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
        ({"rope_parameters": [1]}, "rope_parameters=[1]", "must be an object"),
    ],
)  # fmt: skip
def test_two_ropes_that_disagree_are_refused(given, key, rule):
    config = {name: value for name, value in made.LLAMA_3_2.items() if not name.startswith("rope")}
    with pytest.raises(ConfigError) as refused:
        llama_hf.from_hf({**config, **given})
    assert str(refused.value).startswith(f"config.json:{key}: ")
    assert rule in str(refused.value)


def test_two_ropes_that_agree_are_one():
    config = {name: value for name, value in made.LLAMA_3_2.items() if not name.startswith("rope")}
    both = {"rope_parameters": {**LLAMA_3, "rope_theta": 5e5}, "rope_scaling": {**LLAMA_3, "type": "llama3"}}
    once = llama_hf.from_hf({**config, "rope_scaling": LLAMA_3, "rope_theta": 5e5})
    assert llama_hf.from_hf({**config, **both, "rope_theta": 500000}) == once
