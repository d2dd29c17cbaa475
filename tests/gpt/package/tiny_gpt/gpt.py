"""GPT-2's architecture (Radford et al., 2019), with attention that titanlab can replace."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tiny_gpt.gpt_schema import Gpt
from titanlab.techniques.model.contract import ModelBuilder
from titanlab.techniques.model.language_model import LanguageModel


@dataclass(frozen=True)
class GptBuilder(ModelBuilder):
    """What `Gpt.implementation` returns."""

    config: Gpt

    def build(self, *, seq_len: int) -> GptModel:
        """The whole model; titanlab calls it on the meta device and removes what other stages have."""
        return GptModel(self.config)


class GptModel(LanguageModel):
    """Tokens [batch, seq] → logits [batch, seq, vocab_size]."""

    def __init__(self, config: Gpt) -> None:
        super().__init__()
        self.embedding = Embedding(config)
        self.layers = nn.ModuleDict({str(index): Block(config) for index in range(config.depth)})
        self.norm = nn.LayerNorm(config.width)
        self.head = TiedHead(config) if config.tied_head else nn.Linear(config.width, config.vocab_size)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        # A stage of a pipeline lacks some pieces; what it is given are hidden states then.
        hidden = tokens if self.embedding is None else self.embedding(tokens, positions)
        for layer in self.layers.values():
            hidden = layer(hidden)
        if self.norm is not None:
            hidden = self.norm(hidden)
        if isinstance(self.head, TiedHead):
            return self.head(hidden, self.embedding.tokens.weight)
        return hidden if self.head is None else self.head(hidden)


class Embedding(nn.Module):
    """What a token is, and where: [batch, seq] ids → [batch, seq, width]."""

    def __init__(self, config: Gpt) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.places = nn.Embedding(config.places, config.width)

    def forward(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        # One row for each token, not for each position: with tensor parallelism every rank keeps its own tokens.
        return self.tokens(tokens) + self.places(positions.expand_as(tokens))


class Block(nn.Module):
    """[batch, seq, width] → the same."""

    def __init__(self, config: Gpt) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.width)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.width)
        self.mlp = Mlp(config)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attn(self.ln_1(hidden))
        return hidden + self.mlp(self.ln_2(hidden))


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: Gpt) -> None:
        super().__init__()
        self.head_dim = config.width // config.heads
        self.query, self.value = (nn.Linear(config.width, config.width) for _ in range(2))
        # A bias of keys changes nothing: softmax takes the same off every score of a row.
        self.key = nn.Linear(config.width, config.width, bias=False)
        self.inner = InnerAttention()
        self.out = nn.Linear(config.width, config.width)

    def forward(self, hidden: Tensor) -> Tensor:
        # -1 heads: under tensor parallelism a rank has some of them.
        q, k, v = (
            layer(hidden).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        return self.out(self.inner(q, k, v).transpose(1, 2).flatten(2))


class InnerAttention(nn.Module):
    """q, k, v [batch, heads, seq, head_dim] → [batch, heads, seq, head_dim]; context parallelism takes its place."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Mlp(nn.Module):
    """[batch, seq, width] → the same, through four times the width."""

    def __init__(self, config: Gpt) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(hidden)))


class TiedHead(nn.Module):
    """A head with a bias of its own and the embedding's table."""

    def __init__(self, config: Gpt) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(config.vocab_size))

    def forward(self, hidden: Tensor, table: Tensor) -> Tensor:
        return F.linear(hidden, table, self.bias)
