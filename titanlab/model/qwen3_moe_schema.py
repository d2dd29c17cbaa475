"""Config of Qwen3 models with experts."""

from __future__ import annotations

from dataclasses import dataclass

from titanlab.model.moe_huggingface import Qwen3MoeFamily
from titanlab.model.moe_schema import ExpertFields
from titanlab.model.qwen3_schema import Qwen3
from titanlab.options import option


@option("model", "qwen3_moe")
@dataclass(kw_only=True)
class Qwen3Moe(ExpertFields, Qwen3):
    """A Qwen3 whose feed-forwards are experts (arXiv 2505.09388, section 2); every block has them, none is shared.

    Attributes:
        ffn_dim: width of one expert.
        experts: of each block.
        active_experts: that compute each token: those that are most probable to the router, whose probabilities are
            divided by their sum.
        balance, bias_rate, auxiliary_weight: see `ExpertFields`.
        dim, layers, heads, …: as of a dense Qwen3.

    Raises:
        ConfigError: a value breaks a rule.
    """

    kind: str = "qwen3_moe"
    experts: int = 128
    active_experts: int = 8

    @classmethod
    def hugging_face(cls) -> Qwen3MoeFamily:
        return Qwen3MoeFamily(cls)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_routing()
