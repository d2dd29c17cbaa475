"""The loop with experts that a person writes in an afternoon, of plain PyTorch: nothing of titanlab is imported.

A Qwen3 with experts (arXiv 2505.09388): RMSNorm, rotary positions, norms of queries and keys, and in each block a
router that chooses experts, whose products are `torch.nn.functional.grouped_mm`. Random tokens, AdamW, clipping; prints
step times as one JSON line.
"""

from __future__ import annotations

import argparse
import json
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Causal attention with grouped queries, whose queries and keys are normalised."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.head_dim = args.head_dim
        self.wq = nn.Linear(args.dim, args.heads * args.head_dim, bias=False)
        self.wk = nn.Linear(args.dim, args.kv_heads * args.head_dim, bias=False)
        self.wv = nn.Linear(args.dim, args.kv_heads * args.head_dim, bias=False)
        self.wo = nn.Linear(args.heads * args.head_dim, args.dim, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(args.head_dim, eps=1e-6), nn.RMSNorm(args.head_dim, eps=1e-6)

    def forward(self, hidden: Tensor, rope: Tensor) -> Tensor:
        q, k, v = (w(hidden).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(self.q_norm(q), rope), rotate(self.k_norm(k), rope)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        output: Tensor = self.wo(mixed.transpose(1, 2).flatten(2))
        return output


class Experts(nn.Module):
    """The weighted sum of the chosen experts' outputs; tokens are sorted by expert."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.active, self.count = args.active, args.experts
        self.router = nn.Linear(args.dim, args.experts, bias=False)
        self.w1 = nn.Parameter(torch.empty(args.experts, args.ffn_dim, args.dim))
        self.w3 = nn.Parameter(torch.empty(args.experts, args.ffn_dim, args.dim))
        self.w2 = nn.Parameter(torch.empty(args.experts, args.dim, args.ffn_dim))

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(self.active, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        ends = torch.bincount(chosen.flatten(), minlength=self.count).cumsum(0).int()
        rows = tokens[order // self.active]
        gate = F.grouped_mm(rows, self.w1.transpose(1, 2), offs=ends)
        up = F.grouped_mm(rows, self.w3.transpose(1, 2), offs=ends)
        out = F.grouped_mm(F.silu(gate) * up, self.w2.transpose(1, 2), offs=ends)
        out = out * weights.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(tokens).index_add(0, order // self.active, out).view_as(hidden)


class Block(nn.Module):
    """One layer."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(args.dim, eps=1e-6), nn.RMSNorm(args.dim, eps=1e-6)
        self.attention, self.experts = Attention(args), Experts(args)

    def forward(self, hidden: Tensor, rope: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), rope)
        output: Tensor = hidden + self.experts(self.ffn_norm(hidden))
        return output


class Model(nn.Module):
    """Tokens [batch, seq] → logits."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.embedding = nn.Embedding(args.vocab, args.dim)
        self.blocks = nn.ModuleList(Block(args) for _ in range(args.layers))
        self.norm, self.head = nn.RMSNorm(args.dim, eps=1e-6), nn.Linear(args.dim, args.vocab, bias=False)
        frequencies = 1e6 ** -(torch.arange(0, args.head_dim, 2) / args.head_dim)
        angles = torch.outer(torch.arange(args.seq), frequencies)
        self.register_buffer("rope", torch.polar(torch.ones_like(angles), angles).unsqueeze(1))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden, self.rope)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Turn neighbouring elements of [batch, seq, heads, head_dim] by the angles of their position."""
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * rope).flatten(-2)


def main() -> None:
    """Train and print `{"step_seconds": […], "processor_seconds": […], "loss": …, "parameters": …}`."""
    parser = argparse.ArgumentParser(description=__doc__)
    sizes = {
        "steps": 20, "batch": 8, "seq": 512, "dim": 256, "layers": 4, "heads": 8, "kv-heads": 4, "head-dim": 32,
        "ffn-dim": 256, "experts": 8, "active": 2, "vocab": 2048,
    }  # fmt: skip
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = Model(args)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02) if parameter.ndim > 1 else nn.init.ones_(parameter)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    generator = torch.Generator().manual_seed(0)
    seconds, processor, loss_value = [], [], 0.0
    for _ in range(args.steps):
        start, busy = time.perf_counter(), time.process_time()
        window = torch.randint(0, args.vocab, (args.batch, args.seq + 1), generator=generator)
        loss = F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss_value = loss.item()
        seconds.append(time.perf_counter() - start)
        processor.append(time.process_time() - busy)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    figures = {"step_seconds": seconds, "processor_seconds": processor, "loss": loss_value, "parameters": parameters}
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
