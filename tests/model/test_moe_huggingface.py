"""Models with experts in the form of transformers."""

import pytest

from tests.model.published import load
from titanlab.errors import ConfigError
from titanlab.techniques.model.contract import Foreign

NAMES = ["qwen3_moe_debug", "mixtral_debug"]
MODELS = {name: load(name) for name in NAMES}
# The keys of the numbers of experts.
COUNT = {"qwen3_moe_debug": "num_experts", "mixtral_debug": "num_local_experts"}


def config_of(name, **changes):
    config = {**MODELS[name].hugging_face().to_hf(MODELS[name], context=64), **changes}
    return {key: value for key, value in config.items() if value is not ...}


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_read(name):
    model = MODELS[name]
    config = config_of(name)
    assert (config[COUNT[name]], config["num_experts_per_tok"]) == (model.experts, model.active_experts)
    assert model.hugging_face().difference(model, model.hugging_face().from_hf(config)) == ""


def test_the_width_of_an_expert_is_not_that_of_a_dense_feed_forward():
    model, config = MODELS["qwen3_moe_debug"], config_of("qwen3_moe_debug")
    assert config["moe_intermediate_size"] == model.ffn_dim
    assert config["intermediate_size"] == model.ffn_dim * model.active_experts
    assert model.hugging_face().from_hf({**config, "intermediate_size": 12345}).ffn_dim == model.ffn_dim


@pytest.mark.parametrize("name", NAMES)
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


def test_both_names_of_the_number_of_experts_are_read():
    count = MODELS["qwen3_moe_debug"].experts
    for changes in (
        {"num_experts": ..., "num_local_experts": count},
        {"num_experts": None, "num_local_experts": count},
    ):
        config = config_of("qwen3_moe_debug", **changes)
        assert MODELS["qwen3_moe_debug"].hugging_face().from_hf(config).experts == count


def test_missing_keys_have_the_defaults_of_transformers():
    lacking = dict.fromkeys(("num_local_experts", "num_experts_per_tok", "rms_norm_eps", "rope_theta"), ...)
    model = MODELS["mixtral_debug"].hugging_face().from_hf(config_of("mixtral_debug", **lacking))
    assert (model.experts, model.active_experts) == (8, 2)
    # A Llama's would be 1e-6 and 10,000.
    assert (model.norm_eps, model.rope_theta) == (1e-5, 1_000_000.0)


@pytest.mark.parametrize(
    ("name", "changes", "line"),
    [
        ("qwen3_moe_debug", {"num_experts": ...}, "num_local_experts=null: must be a whole number"),
        ("qwen3_moe_debug", {"num_experts_per_tok": ...}, "num_experts_per_tok=null: must be a whole number"),
        ("qwen3_moe_debug", {"num_experts_per_tok": 99}, "num_experts_per_tok=99: is more than the "),
        ("qwen3_moe_debug", {"decoder_sparse_step": 2}, "decoder_sparse_step=2: is not computed here"),
        ("qwen3_moe_debug", {"mlp_only_layers": [0]}, "mlp_only_layers=[0]: is not computed here"),
        ("qwen3_moe_debug", {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size=64: is not"),
        # A file without it means false, and so does null.
        (
            "qwen3_moe_debug",
            {"norm_topk_prob": None},
            "norm_topk_prob=false: is not computed here; import a model with norm_topk_prob=true",
        ),
        (
            "qwen3_moe_debug",
            {"norm_topk_prob": ...},
            "norm_topk_prob=false: is not computed here; import a model with norm_topk_prob=true",
        ),
        ("mixtral_debug", {"num_local_experts": 0}, "num_local_experts=0: must be a whole number"),
        (
            "mixtral_debug",
            {"num_experts_per_tok": 5, "num_local_experts": 4},
            "num_experts_per_tok=5: is more than the 4 experts",
        ),
        ("mixtral_debug", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1: is not computed here"),
        ("mixtral_debug", {"sliding_window": 4096}, "sliding_window=4096: is not computed here"),
    ],
)
def test_what_is_not_computed_or_incomplete_is_told(name, changes, line):
    with pytest.raises(ConfigError) as refused:
        MODELS[name].hugging_face().from_hf(config_of(name, **changes))
    assert str(refused.value).startswith(f"config.json:{line}")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("changes", "differs"),
    [
        ({}, ""),
        ({"active_experts": 3}, "active_experts"),
        ({"vocab_size": 64}, "vocab_size"),
        ({"balance": "none"}, ""),
    ],
)
def test_what_computes_differently_is_named(name, changes, differs):
    model = MODELS[name]
    assert model.hugging_face().difference(model, load(name, **changes)) == differs
