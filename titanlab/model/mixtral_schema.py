"""Config of Mixtral models."""

from __future__ import annotations

from dataclasses import dataclass

from titanlab.model.llama_schema import Llama
from titanlab.model.moe_huggingface import MixtralFamily
from titanlab.model.moe_schema import ExpertFields
from titanlab.options import option


@option("model", "mixtral")
@dataclass(kw_only=True)
class Mixtral(ExpertFields, Llama):
    """A Mixtral (arXiv 2401.04088): a Llama whose feed-forwards are experts.

    Its top-k of logits, then a softmax over the chosen, gives the same numbers as a softmax over all, whose chosen are
    divided by their sum.

    Attributes:
        ffn_dim: width of one expert.
        experts: of each block.
        active_experts: that compute each token.
        balance, bias_rate, auxiliary_weight: see `ExpertFields`.
        dim, layers, heads, …: as of a Llama.

    Raises:
        ConfigError: a value breaks a rule.
    """

    kind: str = "mixtral"
    rope_theta: float = 1_000_000.0
    experts: int = 8
    active_experts: int = 2

    @classmethod
    def hugging_face(cls) -> MixtralFamily:
        return MixtralFamily(cls)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_routing()
