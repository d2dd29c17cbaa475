"""Config of Qwen3 models with experts."""

from __future__ import annotations

from dataclasses import dataclass

from titanlab.costs.account import RoutedExperts
from titanlab.model.moe_huggingface import Qwen3MoeFamily
from titanlab.model.moe_schema import check_experts
from titanlab.model.qwen3_schema import Qwen3
from titanlab.options import option


@option("model", "qwen3_moe")
@dataclass(kw_only=True)
class Qwen3Moe(Qwen3):
    """A Qwen3 whose feed-forwards are experts (arXiv 2505.09388, section 2); every block has them, none is shared.

    Attributes:
        ffn_dim: width of one expert.
        experts: of each block.
        active_experts: that compute each token: those that are most probable to the router, whose probabilities are
            divided by their sum.
        dim, layers, heads, …: as of a dense Qwen3.

    Raises:
        ConfigError: a value breaks a rule.
    """

    kind: str = "qwen3_moe"
    experts: int = 128
    active_experts: int = 8

    @property
    def routed(self) -> RoutedExperts:
        return RoutedExperts(count=self.experts, active=self.active_experts)

    @classmethod
    def hugging_face(cls) -> Qwen3MoeFamily:
        return Qwen3MoeFamily(cls)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_experts(self.experts, self.active_experts)
