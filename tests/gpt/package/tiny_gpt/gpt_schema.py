"""The schema of GPT models. Torch-free, as every schema."""

from __future__ import annotations

from dataclasses import dataclass

from titanlab.costs.setting import Setting
from titanlab.errors import ConfigError
from titanlab.options import option


@option("model", "gpt")
@dataclass(kw_only=True)
class Gpt:
    """A decoder-only transformer like GPT-2: LayerNorm, learned positions, GELU, biases.

    Attributes:
        width: of the residual stream.
        depth: number of blocks.
        heads: attention heads.
        places: positions that the model learns; no sequence is longer.
        vocab_size: rows of the embedding and of the head.
        tied_head: the head multiplies with the embedding's table.
    """

    kind: str = "gpt"
    width: int
    depth: int
    heads: int
    places: int
    vocab_size: int
    tied_head: bool = False

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ConfigError("model.heads", self.heads, f"must divide width={self.width}", "try 1")

    def check(self, setting: Setting) -> None:
        """The rule that reaches beyond the model's own fields."""
        if setting.seq_len > self.places:
            rule = f"is longer than the {self.places} positions that the model learns"
            raise ConfigError("training.seq_len", setting.seq_len, rule, f"try {self.places}")
