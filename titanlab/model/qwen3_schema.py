"""Config of dense Qwen3 models."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from titanlab.costs.layout import divisors
from titanlab.errors import ConfigError
from titanlab.model.contract import ReducedSizes
from titanlab.model.llama_schema import Llama, nearest
from titanlab.model.qwen3_huggingface import Qwen3Family
from titanlab.options import option


@option("model", "qwen3")
@dataclass(kw_only=True)
class Qwen3(Llama):
    """A dense Qwen3 (arXiv 2505.09388, section 2): a Llama whose queries and keys are normalised in each head.

    Attributes:
        head_dim: width of a head; heads · head_dim need not be dim.
        dim, layers, heads, …: as of a Llama.

    Raises:
        ConfigError: a value breaks a rule.
    """

    has_head_norms: ClassVar[bool] = True

    kind: str = "qwen3"
    head_dim: int = 128  # a field here, derived for a Llama
    norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0

    def reduced(self, sizes: ReducedSizes) -> Qwen3:
        """As of a Llama; heads that were wider or narrower than the stream stay so."""
        attention_dim, unit = sizes.heads * sizes.head_dim, sizes.unit
        if self.attention_dim > self.dim:
            dim = max(unit, attention_dim // 2 // unit * unit)
        else:
            dim = attention_dim if self.attention_dim == self.dim else 2 * attention_dim
        made = replace(self, head_dim=sizes.head_dim)
        return replace(Llama.reduced(made, sizes), dim=dim)  # type: ignore[return-value]

    @classmethod
    def hugging_face(cls) -> Qwen3Family:
        return Qwen3Family(cls)

    def _check_heads(self) -> None:
        if self.head_dim < 2 or self.head_dim % 2:
            rule = "must be an even number of at least 2: heads are turned in pairs"
            raise ConfigError("model.head_dim", self.head_dim, rule, "try 128")
        if self.heads % self.kv_heads:
            cure = f"try {nearest(divisors(self.heads), self.kv_heads)}"
            raise ConfigError("model.kv_heads", self.kv_heads, f"must divide {self.heads} query heads", cure)
