"""Llamas, Qwen3 and Mixtral in the form of Hugging Face transformers: config.json and names of tensors. Torch-free.

Sources: the config.json files of the released Qwen3-0.6B to Qwen3-32B, Qwen3-30B-A3B, Qwen3-235B-A22B, Mixtral-8x7B and
Mixtral-8x22B, and the names of tensors in their files. Models with experts have one tensor for each expert.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from titanlab.errors import ConfigError
from titanlab.techniques.model.contract import Foreign, HuggingFaceFamily

if TYPE_CHECKING:
    from titanlab.costs import RoutedExperts
    from titanlab.techniques.model.llama_schema import Llama

# titanlab's names of the embedding's table and of the head's.
EMBEDDING, HEAD = "tok_embeddings.weight", "output.weight"
_OUTSIDE = {EMBEDDING: "model.embed_tokens.weight", "norm.weight": "model.norm.weight", HEAD: "lm_head.weight"}
_IN_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
# transformers rotates the pairs (i, i + head_dim/2) of a head, titanlab neighbouring elements.
_ROTATED = ("attention.wq", "attention.wk", "attention.q_norm", "attention.k_norm")
_SIZES = {
    "dim": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "ffn_dim": "intermediate_size",
    "vocab_size": "vocab_size",
}
_SCALING = {
    "rope_factor": "factor",
    "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
    "rope_original_context": "original_max_position_embeddings",
}
# Features that are not supported, each with the value that switches it off.
UNSUPPORTED: Mapping[str, Any] = {
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
    "sliding_window": None,
}


@dataclass(frozen=True)
class LlamaFamily(HuggingFaceFamily["Llama"]):
    """Llamas in the form of transformers.

    Attributes:
        schema: the config's class; an argument, because llama_schema.py imports this module.
    """

    schema: type[Llama]
    architectures: Sequence[str] = ("LlamaForCausalLM",)
    model_type: ClassVar[str] = "llama"
    unsupported: ClassVar[Mapping[str, Any]] = UNSUPPORTED
    # For an expert's matrix: titanlab's name → transformers' name. Then transformers' name of the experts' module.
    expert_matrices: ClassVar[Mapping[str, str]] = {}
    expert_module: ClassVar[str] = ""
    # Fields that only a subclass's config has, and that change what a model computes.
    compared: ClassVar[Sequence[str]] = ()
    # transformers' defaults, for a config.json that lacks these keys.
    norm_eps: ClassVar[float] = 1e-6
    rope_theta: ClassVar[float] = 10000.0
    # Checkpoints from 2023 have an `inv_freq` in each block; later ones may have one for the whole model.
    derived = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.(original_)?inv_freq")

    def tensors(self, model: Llama) -> dict[str, Foreign]:
        places = {}
        for name in model.account().parameters:
            if name in _OUTSIDE:
                places[name] = Foreign(name=_OUTSIDE[name])
                continue
            _, layer, rest = name.split(".", 2)
            module, head, stack = rest.removesuffix(".weight"), 0, range(0)
            if module in _IN_BLOCK:
                theirs, head = _IN_BLOCK[module], model.head_dim if module in _ROTATED else 0
            elif module == "feed_forward.router":
                theirs = f"{self.expert_module}.gate"
            else:
                theirs = f"{self.expert_module}.experts.*.{self.expert_matrices[module[-2:]]}"
                stack = range(_routed(model).count)
            theirs = f"model.layers.{layer}.{theirs}.weight"
            experts = tuple(theirs.replace("*", str(number)) for number in stack)
            places[name] = Foreign(name=theirs, head=head, stack=experts)
        return places

    def copies(self, model: Llama) -> dict[str, str]:
        return {_OUTSIDE[HEAD]: _OUTSIDE[EMBEDDING]} if model.tied_embeddings else {}

    def from_hf(self, config: Mapping[str, Any]) -> Llama:
        for name, off in self.unsupported.items():
            if (value := config.get(name)) not in (None, off):
                raise _wrong(name, value, "is not supported", f"import a model with {name}={_json(off)}")
        sizes: dict[str, Any] = {ours: whole_number(config, theirs) for ours, theirs in _SIZES.items()}
        return self.schema(
            **sizes,
            **self.head_fields(config, sizes),
            kv_heads=whole_number(config, "num_key_value_heads", sizes["heads"]),
            norm_eps=_number(config, "rms_norm_eps", self.norm_eps),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            **_rope(config, self.rope_theta),
        )

    def head_fields(self, config: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
        """Further fields of the config. A Llama has none: the width of its heads is derived, so it is only checked."""
        dim, heads = sizes["dim"], sizes["heads"]
        head_dim = whole_number(config, "head_dim", dim // heads)
        if head_dim * heads != dim:
            rule = f"heads are hidden_size / num_attention_heads = {dim} / {heads} wide here"
            raise _wrong("head_dim", head_dim, rule, "import a Llama whose heads are as wide")
        return {}

    def to_hf(self, model: Llama, *, context: int) -> dict[str, Any]:
        """config.json in the style of transformers 4, which transformers 5 reads too."""
        scaling = {theirs: getattr(model, ours) for ours, theirs in _SCALING.items()}
        return {
            "architectures": list(self.architectures),
            "model_type": self.model_type,
            **{theirs: getattr(model, ours) for ours, theirs in _SIZES.items()},
            "num_key_value_heads": model.kv_heads,
            "head_dim": model.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "initializer_range": 0.02,
            "max_position_embeddings": context,
            "rms_norm_eps": model.norm_eps,
            "rope_theta": model.rope_theta,
            "rope_scaling": {"rope_type": "llama3", **scaling} if model.rope_factor != 1 else None,
            "tie_word_embeddings": model.tied_embeddings,
            "use_cache": True,
        }

    def stretched_context(self, model: Llama) -> int:
        return int(model.rope_factor * model.rope_original_context) if model.rope_factor != 1 else 0

    def difference(self, model: Llama, other: Llama) -> str:
        names = [*_SIZES, "kv_heads", "tied_embeddings", "norm_eps", "rope_theta", "rope_factor", *self.compared]
        if model.rope_factor != 1:
            names += _SCALING
        return next((name for name in names if getattr(model, name) != getattr(other, name)), "")


def _rope(config: Mapping[str, Any], default_theta: float) -> dict[str, Any]:
    """The config's `rope_*` fields. ConfigError: it has two different rotations; libraries choose differently."""
    ropes: dict[str, dict[str, Any]] = {}
    for place in ("rope_parameters", "rope_scaling"):
        value = config.get(place) or {}
        if not isinstance(value, Mapping):
            raise _wrong(place, value, "must be an object", "download the model again")
        # Either of `rope_type` and the older `type` may be null.
        kinds = [kind for kind in (value.get("rope_type"), value.get("type")) if kind is not None]
        ropes[place] = {**value, "rope_type": kinds[0] if kinds else "default"} if value else {}
    parameters, scaling = ropes.values()
    cure = "leave out the one that the model was not trained with"
    for name in ("rope_type", *_SCALING.values(), "rope_theta", "partial_rotary_factor"):
        ours, theirs = parameters.get(name), scaling.get(name)
        # If one object lacks rope_theta or partial_rotary_factor, its value comes from the rest of the file.
        differs = ours != theirs and (None not in (ours, theirs) or name in _SCALING.values())
        if parameters and scaling and differs:
            rule = f"disagrees with rope_scaling, which has {name}={_json(theirs)}"
            raise _wrong(f"rope_parameters.{name}", _json(ours), rule, cure)
    for place, rope in ropes.items():
        for name in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
            inner, outer = rope.get(name), config.get(name)
            if inner is not None and outer is not None and inner != outer:
                rule = f"disagrees with {name}={_json(outer)} beside it"
                raise _wrong(f"{place}.{name}", _json(inner), rule, cure)
    rope = parameters or scaling
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "llama3"):
        raise _wrong("rope_type", kind, "is a scaling that is not supported", "known: default, llama3")
    if rope.get("partial_rotary_factor") not in (None, 1.0):
        rule = "turns only part of a head, which is not supported"
        raise _wrong("partial_rotary_factor", rope["partial_rotary_factor"], rule, "import a Llama without it")
    theta = _number(rope if rope.get("rope_theta") is not None else config, "rope_theta", default_theta)
    fields: dict[str, Any] = {"rope_theta": theta}
    for ours, theirs in _SCALING.items() if kind == "llama3" else ():
        fields[ours] = (whole_number if ours == "rope_original_context" else _number)(rope, theirs)
    return fields


def whole_number(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = default if config.get(name) is None else config[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _wrong(name, value, "must be a whole number of at least 1", "download the model again")
    return value


def _number(config: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = default if config.get(name) is None else config[name]
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _wrong(name, value, "must be a number", "download the model again")
    return float(value)


def _wrong(name: str, value: object, rule: str, cure: str) -> ConfigError:
    return ConfigError(f"config.json:{name}", value, rule, cure)


def _json(value: object) -> str:
    return {False: "false", True: "true", None: "null"}[value] if isinstance(value, bool | None) else str(value)


_FULL = "full_attention"
# The released files have a `sliding_window`, but switch it off by `use_sliding_window`: only the latter is checked.
_UNSUPPORTED_BY_QWEN3 = {**UNSUPPORTED, "use_sliding_window": False}
del _UNSUPPORTED_BY_QWEN3["sliding_window"]


@dataclass(frozen=True)
class Qwen3Family(LlamaFamily):
    """Dense Qwen3 models in the form of transformers; they name their tensors as Llamas do."""

    architectures: Sequence[str] = ("Qwen3ForCausalLM",)
    model_type: ClassVar[str] = "qwen3"
    compared: ClassVar[Sequence[str]] = ("head_dim",)
    unsupported: ClassVar[Mapping[str, Any]] = _UNSUPPORTED_BY_QWEN3

    def from_hf(self, config: Mapping[str, Any]) -> Llama:
        kinds = config.get("layer_types")
        others = [kind for kind in kinds if kind != _FULL] if isinstance(kinds, list) else [kinds]
        if kinds is not None and others:
            raise _wrong("layer_types", others[0], "is not supported", f"import a model whose layers are all {_FULL}")
        return super().from_hf(config)

    def head_fields(self, config: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
        # 128 is the default of transformers' Qwen3Config; the released files state the width.
        return {"head_dim": whole_number(config, "head_dim", 128)}

    def to_hf(self, model: Llama, *, context: int) -> dict[str, Any]:
        config = super().to_hf(model, context=context)
        del config["mlp_bias"]
        return {**config, "use_sliding_window": False, "sliding_window": None, "max_window_layers": model.layers}


@dataclass(frozen=True)
class Qwen3MoeFamily(Qwen3Family):
    """Qwen3 models with experts in the form of transformers."""

    architectures: Sequence[str] = ("Qwen3MoeForCausalLM",)
    model_type: ClassVar[str] = "qwen3_moe"
    expert_module: ClassVar[str] = "mlp"
    expert_matrices: ClassVar[Mapping[str, str]] = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    compared: ClassVar[Sequence[str]] = ("head_dim", "experts", "active_experts")
    unsupported: ClassVar[Mapping[str, Any]] = {
        **_UNSUPPORTED_BY_QWEN3,
        # Blocks without experts, experts that see every token, and weights not divided by their sum are not supported.
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "shared_expert_intermediate_size": 0,
        "norm_topk_prob": True,
    }

    def from_hf(self, config: Mapping[str, Any]) -> Llama:
        # transformers takes a missing `norm_topk_prob` as False.
        config = {**config, "norm_topk_prob": config.get("norm_topk_prob") or False}
        return super().from_hf({**config, "intermediate_size": whole_number(config, "moe_intermediate_size", 768)})

    def head_fields(self, config: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
        # The released files have `num_experts`; transformers 5 writes `num_local_experts`.
        name = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
        numbers = {"experts": whole_number(config, name), "active_experts": _active(config)}
        return {**super().head_fields(config, sizes), **numbers}

    def to_hf(self, model: Llama, *, context: int) -> dict[str, Any]:
        routed = _routed(model)
        return {
            **super().to_hf(model, context=context),
            # The width of blocks without experts: released files state it although their models have no such block.
            "intermediate_size": model.ffn_dim * routed.active,
            "moe_intermediate_size": model.ffn_dim,
            "num_experts": routed.count,
            "num_experts_per_tok": routed.active,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "output_router_logits": False,
            # The value of the released files; inference does not read it.
            "router_aux_loss_coef": 0.001,
        }


@dataclass(frozen=True)
class MixtralFamily(LlamaFamily):
    """Mixtrals in the form of transformers."""

    architectures: Sequence[str] = ("MixtralForCausalLM",)
    model_type: ClassVar[str] = "mixtral"
    expert_module: ClassVar[str] = "block_sparse_moe"
    expert_matrices: ClassVar[Mapping[str, str]] = {name: name for name in ("w1", "w2", "w3")}
    compared: ClassVar[Sequence[str]] = ("experts", "active_experts")
    unsupported: ClassVar[Mapping[str, Any]] = {**UNSUPPORTED, "router_jitter_noise": 0.0}
    norm_eps: ClassVar[float] = 1e-5
    rope_theta: ClassVar[float] = 1_000_000.0

    def head_fields(self, config: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
        numbers = {"experts": whole_number(config, "num_local_experts", 8), "active_experts": _active(config, 2)}
        return {**super().head_fields(config, sizes), **numbers}

    def to_hf(self, model: Llama, *, context: int) -> dict[str, Any]:
        config, routed = super().to_hf(model, context=context), _routed(model)
        for name in ("mlp_bias", "attention_bias"):
            del config[name]
        return {
            **config,
            "num_local_experts": routed.count,
            "num_experts_per_tok": routed.active,
            "router_jitter_noise": 0.0,
            "output_router_logits": False,
            "router_aux_loss_coef": 0.02,
            "sliding_window": None,
        }


def _routed(model: Llama) -> RoutedExperts:
    assert model.routed is not None
    return model.routed


def _active(config: Mapping[str, Any], default: int | None = None) -> int:
    active = whole_number(config, "num_experts_per_tok", default)
    count = config.get("num_experts", config.get("num_local_experts", active))
    if isinstance(count, int) and active > count:
        raise _wrong("num_experts_per_tok", active, f"is more than the {count} experts", "download the model again")
    return active
