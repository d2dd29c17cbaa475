"""Models with experts in the form of Hugging Face transformers. Torch-free.

Sources: the config.json files of the released Qwen3-30B-A3B, Qwen3-235B-A22B, Mixtral-8x7B and Mixtral-8x22B, and the
names of tensors in their files, which have one tensor for each expert.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from titanlab.costs.account import block_name
from titanlab.errors import ConfigError
from titanlab.model.llama_huggingface import UNSUPPORTED, LlamaFamily, whole_number
from titanlab.model.qwen3_huggingface import UNSUPPORTED as UNSUPPORTED_BY_QWEN3
from titanlab.model.qwen3_huggingface import Qwen3Family
from titanlab.system.foreign import Foreign

if TYPE_CHECKING:
    from titanlab.model.llama_schema import Llama

_EXPERTS = "feed_forward.experts."
# Weight of the auxiliary loss, as the released files have it; inference does not read it.
_QWEN3_AUXILIARY, _MIXTRAL_AUXILIARY = 0.001, 0.02


@dataclass(frozen=True)
class Qwen3MoeFamily(Qwen3Family):
    """Qwen3 models with experts in the form of transformers."""

    architectures: Sequence[str] = ("Qwen3MoeForCausalLM",)
    model_type: ClassVar[str] = "qwen3_moe"
    unsupported: ClassVar[Mapping[str, Any]] = {
        **UNSUPPORTED_BY_QWEN3,
        # Blocks without experts, experts that see every token, and weights that are not divided by their sum.
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "shared_expert_intermediate_size": 0,
        "norm_topk_prob": True,
    }

    def tensors(self, model: Llama) -> dict[str, Foreign]:
        names = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
        return _with_experts(model, super().tensors(model), "mlp", names)

    def from_hf(self, config: Mapping[str, Any]) -> Llama:
        # A file without it means False to transformers.
        config = {**config, "norm_topk_prob": config.get("norm_topk_prob") or False}
        return super().from_hf({**config, "intermediate_size": whole_number(config, "moe_intermediate_size", 768)})

    def head_fields(self, config: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
        # transformers 5 writes the second name; the released files have the first.
        name = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
        numbers = {"experts": whole_number(config, name), "active_experts": _active(config)}
        return {**super().head_fields(config, sizes), **numbers}

    def to_hf(self, model: Llama, *, context: int) -> dict[str, Any]:
        routed = _routed(model)
        return {
            **super().to_hf(model, context=context),
            # Of blocks without experts, of which there are none; the released files have this number.
            "intermediate_size": model.ffn_dim * routed.active,
            "moe_intermediate_size": model.ffn_dim,
            "num_experts": routed.count,
            "num_experts_per_tok": routed.active,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "output_router_logits": False,
            "router_aux_loss_coef": _QWEN3_AUXILIARY,
        }

    def difference(self, model: Llama, other: Llama) -> str:
        return super().difference(model, other) or _difference(model, other)


@dataclass(frozen=True)
class MixtralFamily(LlamaFamily):
    """Mixtrals in the form of transformers."""

    architectures: Sequence[str] = ("MixtralForCausalLM",)
    model_type: ClassVar[str] = "mixtral"
    unsupported: ClassVar[Mapping[str, Any]] = {**UNSUPPORTED, "router_jitter_noise": 0.0}
    norm_eps: ClassVar[float] = 1e-5
    rope_theta: ClassVar[float] = 1_000_000.0

    def tensors(self, model: Llama) -> dict[str, Foreign]:
        return _with_experts(model, super().tensors(model), "block_sparse_moe", {name: name for name in _MATRICES})

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
            "router_aux_loss_coef": _MIXTRAL_AUXILIARY,
            "sliding_window": None,
        }

    def difference(self, model: Llama, other: Llama) -> str:
        return super().difference(model, other) or _difference(model, other)


_MATRICES = ("w1", "w2", "w3")


def _with_experts(
    model: Llama, places: Mapping[str, Foreign], module: str, matrices: Mapping[str, str]
) -> dict[str, Foreign]:
    """The places of tensors, with those of routers and experts.

    Args:
        module: of a block's experts in transformers.
        matrices: their names of an expert's matrices, by ours.
    """
    foreign, count = dict(places), _routed(model).count
    for layer in range(model.layers):
        block = f"model.layers.{layer}.{module}"
        foreign[f"{block_name(layer)}.feed_forward.router.weight"] = Foreign(name=f"{block}.gate.weight")
        for ours, theirs in matrices.items():
            names = tuple(f"{block}.experts.{number}.{theirs}.weight" for number in range(count))
            name = f"{block_name(layer)}.{_EXPERTS}{ours}.weight"
            foreign[name] = Foreign(name=f"{block}.experts.*.{theirs}.weight", stack=names)
    return {name: foreign[name] for name in model.account().parameters}


def _routed(model: Llama) -> Any:
    assert model.routed is not None
    return model.routed


def _active(config: Mapping[str, Any], default: int | None = None) -> int:
    active = whole_number(config, "num_experts_per_tok", default)
    count = config.get("num_experts", config.get("num_local_experts", active))
    if isinstance(count, int) and active > count:
        rule = f"is more than the {count} experts"
        raise ConfigError("config.json:num_experts_per_tok", active, rule, "restore the file")
    return active


def _difference(model: Llama, other: Llama) -> str:
    names = ("experts", "active_experts")
    return next((name for name in names if getattr(model, name) != getattr(other, name)), "")
