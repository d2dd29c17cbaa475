"""config.json and our schema say the same model with experts, both ways; every expert's tensors find their place."""

from dataclasses import replace

import pytest
import torch

from tests.model.published import load
from tests.weights.huggingface import made
from titanlab.cli import main
from titanlab.errors import ConfigError
from titanlab.train.hub_folders import family_for, open_hf

# As released, by what decides what is computed.
PUBLISHED = {
    "qwen3_moe_30b_a3b": {
        "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "rope_scaling": None, "vocab_size": 151936,
        "tie_word_embeddings": False, "attention_bias": False, "hidden_act": "silu", "max_window_layers": 48,
        "sliding_window": None, "use_sliding_window": False, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8, "router_aux_loss_coef": 0.001,
    },
    "mixtral_8x7b": {
        "architectures": ["MixtralForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0, "vocab_size": 32000, "tie_word_embeddings": False, "hidden_act": "silu",
        "sliding_window": None, "num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02,
    },
}  # fmt: skip
NAMES = [
    "qwen3_moe_debug",
    "qwen3_moe_30b_a3b",
    "qwen3_moe_235b_a22b",
    "mixtral_debug",
    "mixtral_8x7b",
    "mixtral_8x22b",
]


@pytest.mark.parametrize("name", NAMES)
def test_every_model_maps_both_ways(name):
    model = load(name)
    family = model.hugging_face()
    config = family.to_hf(model, context=4096)
    assert family.from_hf(config) == model
    assert family_for(config) == family
    assert list(family.tensors(model)) == list(model.account().parameters)
    assert family.difference(model, model) == ""
    assert family.difference(model, replace(model, active_experts=3)) == "active_experts"
    assert family.difference(model, replace(model, experts=256)) == "experts"


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_released_config_is_our_model(name):
    model = load(name)
    assert model.hugging_face().from_hf(PUBLISHED[name]) == model
    written = model.hugging_face().to_hf(model, context=4096)
    assert {key: written[key] for key in PUBLISHED[name]} == PUBLISHED[name]


@pytest.mark.parametrize("family", made.WITH_EXPERTS)
def test_names_are_those_of_transformers(family):
    config = made.WITH_EXPERTS[family]
    model = family_for(config).from_hf(config)
    shapes = model.account().parameters
    found = {
        theirs: place.shape_there(shapes[ours])
        for ours, place in family_for(config).tensors(model).items()
        for theirs in place.names
    }
    assert found == made.names(config)


@pytest.mark.parametrize(
    ("family", "change", "line"),
    [
        ("qwen 3 moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2: is not computed here"),
        ("qwen 3 moe", {"mlp_only_layers": [0]}, "mlp_only_layers=[0]: is not computed here"),
        ("qwen 3 moe", {"norm_topk_prob": False}, "norm_topk_prob=false: is not computed here"),
        ("qwen 3 moe", {"norm_topk_prob": None}, "norm_topk_prob=false: is not computed here"),
        ("qwen 3 moe", {"shared_expert_intermediate_size": 96}, "shared_expert_intermediate_size=96: is not computed"),
        ("qwen 3 moe", {"hidden_act": "gelu"}, "hidden_act=gelu: is not computed here"),
        ("qwen 3 moe", {"num_experts": None}, "num_local_experts=null: must be a whole number of at least 1"),
        ("qwen 3 moe", {"num_experts_per_tok": 9}, "num_experts_per_tok=9: is more than the 8 experts"),
        ("mixtral", {"sliding_window": 4096}, "sliding_window=4096: is not computed here"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1: is not computed here"),
        ("mixtral", {"num_local_experts": 1, "num_experts_per_tok": 1}, "model.experts=1: must be at least 2"),
    ],
)
def test_what_is_not_computed_is_refused(family, change, line):
    config = {name: value for name, value in {**made.WITH_EXPERTS[family], **change}.items() if value is not None}
    with pytest.raises(ConfigError) as refused:
        family_for(config).from_hf(config)
    assert line in str(refused.value)


@pytest.mark.parametrize("family", made.WITH_EXPERTS)
def test_import_and_export_keep_every_bit(tmp_path, family):
    there = made.folder(tmp_path / "hub", made.WITH_EXPERTS[family], torch.bfloat16, files=3)
    assert main(["import", str(there), "--into", str(tmp_path / "one")]) == 0
    assert main(["export", str(tmp_path / "one"), "--into", str(tmp_path / "back"), "--shard-size", "60KB"]) == 0
    assert made.equal(made.read(tmp_path / "back"), made.read(there))


@pytest.mark.parametrize("family", made.WITH_EXPERTS)
def test_a_missing_expert_is_one_line(tmp_path, family, capsys):
    there = made.folder(tmp_path / "hub", made.WITH_EXPERTS[family])
    from safetensors.torch import save_file

    values = made.read(there)
    name = next(name for name in values if ".experts.3." in name)
    del values[name]
    save_file(values, there / "model.safetensors", metadata={"format": "pt"})
    assert main(["import", str(there), "--into", str(tmp_path / "one")]) == 2
    assert f"{name} is absent" in capsys.readouterr().err


def test_a_box_of_a_stack_is_read(tmp_path):
    config = made.QWEN_3_MOE
    source = open_hf(made.folder(tmp_path / "hub", config), "x")
    name = "layers.1.feed_forward.experts.w2.weight"
    whole = source.read(name, [0, 0, 0], list(source.entries[name].shape))
    assert torch.equal(source.read(name, [2, 5, 1], [4, 7, 30]), whole[2:6, 5:12, 1:31])
    assert source.read(name, [2, 0, 0], [0, 64, 40]).shape == (0, 64, 40)
