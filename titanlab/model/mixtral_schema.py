"""Config of Mixtral models."""

from __future__ import annotations

from dataclasses import dataclass

from titanlab.costs.account import RoutedExperts
from titanlab.model.llama_schema import Llama
from titanlab.model.moe_huggingface import MixtralFamily
from titanlab.model.moe_schema import check_experts
from titanlab.options import option


@option("model", "mixtral")
@dataclass(kw_only=True)
class Mixtral(Llama):
    """A Mixtral (arXiv 2401.04088): a Llama whose feed-forwards are experts.

    Its top-k of logits, then a softmax over the chosen, gives the same numbers as a softmax over all, whose chosen are
    divided by their sum.

    Attributes:
        ffn_dim: width of one expert.
        experts: of each block.
        active_experts: that compute each token.
        dim, layers, heads, …: as of a Llama.

    Raises:
        ConfigError: a value breaks a rule.
    """

    kind: str = "mixtral"
    rope_theta: float = 1_000_000.0
    experts: int = 8
    active_experts: int = 2

    @property
    def routed(self) -> RoutedExperts:
        return RoutedExperts(count=self.experts, active=self.active_experts)

    @classmethod
    def hugging_face(cls) -> MixtralFamily:
        return MixtralFamily(cls)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_experts(self.experts, self.active_experts)
