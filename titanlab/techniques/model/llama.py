"""Llama, from scratch: rotary attention with shared key/value heads, RMSNorm, SwiGLU.

Sources: Llama (arXiv 2302.13971), Llama 2 (2307.09288), Llama 3 (2407.21783); RoPE (2104.09864);
grouped-query attention (2305.13245); SwiGLU (2002.05202); RMSNorm (1910.07467).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlab.techniques.model import llama_schema
from titanlab.techniques.model.attention import Documents, HostStarts, InnerAttention, prepared
from titanlab.techniques.model.contract import ModelBuilder
from titanlab.techniques.model.language_model import LanguageModel, Projections
from titanlab.techniques.model.mixture_of_experts import MixtureOfExperts


@dataclass(frozen=True)
class LlamaBuilder(ModelBuilder):
    """Builds the modules that a Llama config describes."""

    config: llama_schema.Llama

    def build(self, *, seq_len: int) -> LlamaModel:
        return LlamaModel(self.config, seq_len=seq_len)


class LlamaModel(LanguageModel):
    """Tokens [batch, seq] → logits [batch, seq, vocab_size].

    With tied embeddings `output` has no weight: it gets the embedding's weight as an argument. So there is one
    parameter with one name, whatever changes the module (meta, `to_empty`, sharding, state dicts). The embedding's
    weight must be gathered when `output` runs: FSDP gathers this weight with the root module, not separately.
    """

    rope: Tensor

    def __init__(self, config: llama_schema.Llama, *, seq_len: int) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings: nn.Embedding | None = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict({str(index): Block(config) for index in range(config.layers)})
        self.norm: nn.RMSNorm | None = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.output: nn.Linear | TiedOutput | None = (
            TiedOutput() if config.tied_embeddings else nn.Linear(config.dim, config.vocab_size, bias=False)
        )
        rope = torch.empty(seq_len, config.head_dim // 2, 2, dtype=torch.float32)
        self.register_buffer("rope", rope, persistent=False)
        if not self.rope.is_meta:
            self.init_buffers()

    def init_buffers(self, device: torch.device | str | None = None) -> None:
        """Compute the rotary table and choose attention kernels, on `device` (None: the buffers' device)."""
        table = rope_table(self.config, seq_len=self.rope.shape[0])
        self.rope = table.to(self.rope.device if device is None else device)
        for module in self.layers.modules():
            if isinstance(module, InnerAttention):
                module.prepare(self.rope.device)

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, starts: Tensor | HostStarts | None = None
    ) -> Tensor:
        """As `LanguageModel` says; ValueError: the sequence is longer than the model was built for."""
        hidden: Tensor = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)
        rope = self._rope(tokens.shape[1], positions)
        documents = None if starts is None else prepared(starts, self.config.attention)
        for layer in self.layers.values():
            hidden = layer(hidden, rope, documents)
        if self.norm is not None:
            hidden = self.norm(hidden)
        if isinstance(self.output, TiedOutput):
            if self.tok_embeddings is None:
                raise RuntimeError("a tied head needs tok_embeddings in the same stage")
            hidden = self.output(hidden, self.tok_embeddings.weight)
        elif self.output is not None:
            hidden = self.output(hidden)
        return hidden

    def _rope(self, seq_len: int, positions: Tensor | None) -> Tensor:
        if positions is not None:
            rows = self.rope[positions]
        elif seq_len <= self.rope.shape[0]:
            rows = self.rope[:seq_len]
        else:
            raise ValueError(f"{seq_len} tokens, but the model was built for {self.rope.shape[0]}")
        return rows.unsqueeze(-3)


class Block(nn.Module):
    """One layer: hidden [batch, seq, dim] → the same shape, with residual attention and feed-forward."""

    def __init__(self, config: llama_schema.Llama) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward: nn.Module = (
            FeedForward(config)
            if config.routed is None
            else MixtureOfExperts(config.dim, config.ffn_dim, config.routed)
        )

    def forward(self, hidden: Tensor, rope: Tensor, documents: Documents | None = None) -> Tensor:
        attended: Tensor = hidden + self.attention(self.attention_norm(hidden), rope, documents)
        fed: Tensor = self.feed_forward(self.ffn_norm(attended))
        return attended + fed


class Attention(nn.Module):
    """Causal self-attention with rotary positions: [batch, seq, dim] → [batch, seq, dim]."""

    def __init__(self, config: llama_schema.Llama) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_dim = config.kv_heads * config.head_dim
        self.wq = nn.Linear(config.dim, config.attention_dim, bias=False)
        self.wk = nn.Linear(config.dim, kv_dim, bias=False)
        self.wv = nn.Linear(config.dim, kv_dim, bias=False)
        self.wo = nn.Linear(config.attention_dim, config.dim, bias=False)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(config.head_dim, eps=config.norm_eps) if config.has_head_norms else None for _ in range(2)
        )
        self.projections = Projections()
        self.inner = InnerAttention(config.attention)

    def forward(self, hidden: Tensor, rope: Tensor, documents: Documents | None = None) -> Tensor:
        # Under tensor parallelism the projections return only this rank's heads: their number is not the config's.
        projected = self.projections(hidden, self.wq, self.wk, self.wv)
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in projected)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, rope), rotate(k, rope)
        mixed = self.inner(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), documents)
        output: Tensor = self.wo(mixed.transpose(1, 2).flatten(2))
        return output


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) · w3 x), [batch, seq, dim] → the same."""

    def __init__(self, config: llama_schema.Llama) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.w2 = nn.Linear(config.ffn_dim, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.projections = Projections()

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = self.projections(hidden, self.w1, self.w3)
        output: Tensor = self.w2(F.silu(gate) * up)
        return output


class TiedOutput(nn.Module):
    """An output head without a parameter: hidden [batch, seq, dim], weight [vocab, dim] → logits."""

    def forward(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return F.linear(hidden, weight)


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate each pair of neighbouring elements by its position's angle, in fp32, and cast back.

    Pairs are (0, 1), (2, 3), … as in Meta's checkpoints, not (0, head_dim/2), … as in Hugging Face's. On a CPU complex
    numbers make the rotation five to ten times faster. torch.compile cannot generate code for complex numbers, but
    fuses the same formula in real numbers.

    Args:
        x: [batch, seq, heads, head_dim].
        rope: cos and sin, fp32, [seq, 1, head_dim / 2, 2] or [batch, seq, 1, head_dim / 2, 2].
    """
    pairs = x.float().unflatten(-1, (-1, 2))
    if torch.compiler.is_compiling():
        a, b = pairs.unbind(-1)
        cos, sin = rope.unbind(-1)
        rotated = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1)
    else:
        rotated = torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(rope))
    return rotated.flatten(-2).type_as(x)


def rope_table(config: llama_schema.Llama, *, seq_len: int) -> Tensor:
    """(cos, sin) of every position and frequency: [seq_len, head_dim / 2, 2], fp32, on the CPU.

    Angles are computed in fp64: at position 100,000 the error of fp32 is 0.01 radian. The scaling is that of Llama 3.1
    (`rope_factor` 1 does not change the frequencies).
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64, device="cpu") / config.head_dim
    frequencies = config.rope_theta**-exponents
    # Keep frequencies that turn often within the original context, divide slow ones by the factor, blend in between.
    turns = config.rope_original_context * frequencies / (2 * math.pi)
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    frequencies = frequencies * (kept + (1 - kept) / config.rope_factor)
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float64, device="cpu"), frequencies)
    return torch.stack((angles.cos(), angles.sin()), dim=-1).float()
