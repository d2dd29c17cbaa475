"""Dense Qwen3 models in the form of Hugging Face transformers. Torch-free.

Source: the config.json files of the released Qwen3-0.6B to Qwen3-32B.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from titanlab.errors import ConfigError
from titanlab.model import llama_huggingface
from titanlab.model.llama_huggingface import LlamaFamily, whole_number

if TYPE_CHECKING:
    from titanlab.model.llama_schema import Llama

_FULL = "full_attention"
# The released files have a `sliding_window`, which `use_sliding_window` switches off.
UNSUPPORTED = {
    **{name: off for name, off in llama_huggingface.UNSUPPORTED.items() if name != "sliding_window"},
    "use_sliding_window": False,
}


@dataclass(frozen=True)
class Qwen3Family(LlamaFamily):
    """Dense Qwen3 models in the form of transformers; they name their tensors as Llamas do."""

    architectures: Sequence[str] = ("Qwen3ForCausalLM",)
    model_type: ClassVar[str] = "qwen3"
    unsupported: ClassVar[Mapping[str, Any]] = UNSUPPORTED

    def from_hf(self, config: Mapping[str, Any]) -> Llama:
        kinds = config.get("layer_types")
        if kinds is not None and (not isinstance(kinds, list) or any(kind != _FULL for kind in kinds)):
            other = next((kind for kind in kinds if kind != _FULL), None) if isinstance(kinds, list) else kinds
            cure = f"import a model whose layers are all {_FULL}"
            raise ConfigError("config.json:layer_types", other, "is not computed here", cure)
        return super().from_hf(config)

    def head_fields(self, config: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
        # transformers' Qwen3Config has this default; the released files state it.
        return {"head_dim": whole_number(config, "head_dim", 128)}

    def to_hf(self, model: Llama, *, context: int) -> dict[str, Any]:
        config = super().to_hf(model, context=context)
        del config["mlp_bias"]
        return {**config, "use_sliding_window": False, "sliding_window": None, "max_window_layers": model.layers}

    def difference(self, model: Llama, other: Llama) -> str:
        return super().difference(model, other) or ("" if model.head_dim == other.head_dim else "head_dim")
