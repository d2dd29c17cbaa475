"""The loop that a person writes in an afternoon: what titanlab's own cost is measured against.

A Llama in plain PyTorch, the same optimizer, the same clipping, random tokens; nothing is recorded but step times, as
one JSON line. With --fsdp it is run under torchrun and shards each block with `fully_shard`.

This file is frozen: it is the yardstick of every figure that compares titanlab with a bare loop. It imports nothing of
titanlab, so that what titanlab fuses, cuts or tiles does not make the yardstick faster. Change it only where a new
torch no longer runs it. tests/benchmarks/test_scripts.py holds it to titanlab's own training.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model; the defaults are those of model=llama_5m."""

    dim: int = 256
    layers: int = 6
    heads: int = 8
    kv_heads: int = 4
    ffn_dim: int = 768
    vocab: int = 2048


class Llama(nn.Module):
    """Tokens [batch, seq] → logits [batch, seq, vocab]; parameters have the names of Meta's checkpoints."""

    rope: Tensor

    def __init__(self, sizes: Sizes, seq_len: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(sizes.vocab, sizes.dim)
        self.layers = nn.ModuleDict({str(index): Block(sizes) for index in range(sizes.layers)})
        self.norm = nn.RMSNorm(sizes.dim, eps=1e-5)
        self.output = nn.Linear(sizes.dim, sizes.vocab, bias=False)
        head_dim = sizes.dim // sizes.heads
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
        angles = torch.outer(torch.arange(seq_len, dtype=torch.float64), 10_000.0**-exponents)
        self.register_buffer("rope", torch.stack((angles.cos(), angles.sin()), dim=-1).float(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tok_embeddings(tokens)
        rope = self.rope[: tokens.shape[1]].unsqueeze(-3)
        for layer in self.layers.values():
            hidden = layer(hidden, rope)
        logits: Tensor = self.output(self.norm(hidden))
        return logits


class Block(nn.Module):
    """One layer: hidden [batch, seq, dim] → the same shape."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(sizes.dim, eps=1e-5)
        self.attention = Attention(sizes)
        self.ffn_norm = nn.RMSNorm(sizes.dim, eps=1e-5)
        self.feed_forward = FeedForward(sizes)

    def forward(self, hidden: Tensor, rope: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), rope)
        output: Tensor = hidden + self.feed_forward(self.ffn_norm(hidden))
        return output


class Attention(nn.Module):
    """Causal self-attention with rotary positions: [batch, seq, dim] → the same."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head_dim = sizes.dim // sizes.heads
        self.wq = nn.Linear(sizes.dim, sizes.dim, bias=False)
        self.wk = nn.Linear(sizes.dim, sizes.kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(sizes.dim, sizes.kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(sizes.dim, sizes.dim, bias=False)

    def forward(self, hidden: Tensor, rope: Tensor) -> Tensor:
        q, k, v = (w(hidden).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        q, k, v = (x.transpose(1, 2) for x in (rotate(q, rope), rotate(k, rope), v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        output: Tensor = self.wo(mixed.transpose(1, 2).flatten(2))
        return output


class FeedForward(nn.Module):
    """SwiGLU: [batch, seq, dim] → the same."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.w1 = nn.Linear(sizes.dim, sizes.ffn_dim, bias=False)
        self.w2 = nn.Linear(sizes.ffn_dim, sizes.dim, bias=False)
        self.w3 = nn.Linear(sizes.dim, sizes.ffn_dim, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = self.w1(hidden), self.w3(hidden)
        output: Tensor = self.w2(F.silu(gate) * up)
        return output


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate neighbouring elements by their position's angle: x [batch, seq, heads, head_dim]."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * torch.view_as_complex(rope)).flatten(-2).type_as(x)


def build(sizes: Sizes, seq_len: int) -> Llama:
    """A model with initial values of its own."""
    torch.manual_seed(0)
    model = Llama(sizes, seq_len)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02) if parameter.ndim > 1 else nn.init.ones_(parameter)
    return model


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer, for all parameters alike."""
    return torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[tuple[Tensor, Tensor]], *, bf16: bool
) -> Iterator[float]:
    """Train on (tokens, labels) and yield the loss of every step."""
    for tokens, labels in batches:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def windows(steps: int, batch: int, seq: int, vocab: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Random tokens and their labels."""
    generator = torch.Generator().manual_seed(int(os.environ.get("RANK", "0")))
    for _ in range(steps):
        window = torch.randint(0, vocab, (batch, seq + 1), generator=generator)
        yield window[:, :-1].contiguous(), window[:, 1:].contiguous()


def main() -> None:
    """Train and print `{"first_step_at": epoch seconds, "step_seconds": […], "loss": …}`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8, help="sequences of one process")
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--bf16", action="store_true", help="forward and backward under autocast")
    parser.add_argument("--fsdp", action="store_true")
    for name, value in vars(Sizes()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    args = parser.parse_args()
    model = build(Sizes(**{name: getattr(args, name) for name in vars(Sizes())}), args.seq)
    if args.fsdp:
        _shard(model)
    optimizer = adamw(model)
    losses = train(model, optimizer, windows(args.steps, args.batch, args.seq, args.vocab), bf16=args.bf16)
    seconds = []
    first_step_at = None
    loss = 0.0
    for _ in range(args.steps):
        start = time.perf_counter()
        loss = next(losses)
        seconds.append(time.perf_counter() - start)
        first_step_at = first_step_at or time.time()
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps({"first_step_at": first_step_at, "step_seconds": seconds, "loss": loss}), flush=True)
    if args.fsdp:
        torch.distributed.destroy_process_group()


def _shard(model: Llama) -> None:
    # Half a second that one process does not need.
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo")
    for block in model.layers.values():
        fully_shard(block)
    fully_shard(model)


if __name__ == "__main__":
    main()
