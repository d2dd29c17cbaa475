"""Folders of Hugging Face's that are made here: random weights, written by safetensors itself."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
}
# The three families, small: multi-head; shared heads with scaled frequencies; tied embeddings.
LLAMA_2 = {**SMALL, "num_key_value_heads": 4, "rope_theta": 10000.0, "rope_scaling": None}
LLAMA_3_1 = {
    **SMALL,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
LLAMA_3_2 = {
    **SMALL,
    "tie_word_embeddings": True,
    # As transformers 5 writes it.
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
# Heads are wider than their share of the stream, and queries and keys are normalised in each head.
QWEN_3 = {
    **SMALL,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 24,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
    "sliding_window": None,
}
# The feed-forward of every block is experts; a file has one tensor for each of them.
QWEN_3_MOE = {
    **QWEN_3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 40,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
MIXTRAL = {
    **SMALL,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rope_theta": 1000000.0,
    "sliding_window": None,
}
WITH_EXPERTS = {"qwen 3 moe": QWEN_3_MOE, "mixtral": MIXTRAL}
FAMILIES = {
    "llama 2": LLAMA_2,
    "llama 3.1": LLAMA_3_1,
    "llama 3.2": LLAMA_3_2,
    "qwen 3": QWEN_3,
    **WITH_EXPERTS,
}


def names(config):
    """Shapes by the names that transformers gives, said here once more."""
    dim, ffn = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim", dim // config["num_attention_heads"])
    q, kv = (head * config[f"num_{kind}_heads"] for kind in ("attention", "key_value"))
    head_norms = {"self_attn.q_norm": (head,), "self_attn.k_norm": (head,)}
    found = {"model.embed_tokens.weight": (config["vocab_size"], dim), "model.norm.weight": (dim,)}
    for layer in range(config["num_hidden_layers"]):
        block = f"model.layers.{layer}"
        for name, shape in {
            "self_attn.q_proj": (q, dim),
            "self_attn.k_proj": (kv, dim),
            "self_attn.v_proj": (kv, dim),
            "self_attn.o_proj": (dim, q),
            **(head_norms if config["model_type"].startswith("qwen3") else {}),
            **feed_forward(config, dim, ffn),
            "input_layernorm": (dim,),
            "post_attention_layernorm": (dim,),
        }.items():
            found[f"{block}.{name}.weight"] = shape
    if not config.get("tie_word_embeddings"):
        found["lm_head.weight"] = (config["vocab_size"], dim)
    return found


def feed_forward(config, dim, ffn):
    """Shapes of a block's feed-forward by the names that transformers gives."""
    if config["model_type"] == "qwen3_moe":
        experts, ffn = config["num_experts"], config["moe_intermediate_size"]
        module, names = "mlp", {"gate_proj": (ffn, dim), "up_proj": (ffn, dim), "down_proj": (dim, ffn)}
    elif config["model_type"] == "mixtral":
        experts, module = config["num_local_experts"], "block_sparse_moe"
        names = {"w1": (ffn, dim), "w3": (ffn, dim), "w2": (dim, ffn)}
    else:
        return {"mlp.gate_proj": (ffn, dim), "mlp.up_proj": (ffn, dim), "mlp.down_proj": (dim, ffn)}
    each = {f"{module}.experts.{number}.{name}": shape for number in range(experts) for name, shape in names.items()}
    return {f"{module}.gate": (experts, dim), **each}


def tensors(config, dtype=torch.float32, seed=0):
    """Values large enough that attention is not flat and logits are not small."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in names(config).items():
        value = torch.randn(shape, generator=generator)
        found[name] = (1 + 0.2 * value if len(shape) == 1 else 0.15 * value).to(dtype)
    return found


def folder(path: Path, config=SMALL, dtype=torch.float32, *, files=1, seed=0, **more) -> Path:
    """The folder, made; `more` are tensors beside those of the model."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "temperature": 0.6}))
    values = {**tensors(config, dtype, seed), **more}
    if files == 1:
        save_file(values, path / "model.safetensors", metadata={"format": "pt"})
        return path
    places = {}
    for number in range(files):
        file = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        part = {name: values[name] for name in list(values)[number::files]}
        save_file(part, path / file, metadata={"format": "pt"})
        places.update(dict.fromkeys(part, file))
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return path


def read(path: Path):
    """All tensors of a folder's safetensors, by the library."""
    return {name: value for file in sorted(path.glob("*.safetensors")) for name, value in load_file(file).items()}


def equal(one, other):
    """Whether two sets of tensors are the same to the last bit."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )
