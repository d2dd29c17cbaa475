"""Causal attention of one rank's two chunks of a sequence, in parts that need no mask, while keys travel.

A sequence of n ranks is cut in 2n chunks, and rank r holds chunks r (its head) and 2n−1−r (its tail): then every rank
has the same work. Of the keys of other ranks,

- those of an *earlier* rank s < r: its head comes before all local rows, its tail after all of them;
- those of a *later* rank s > r: all of them come before the local tail, and after the local head.

So what is left of the causal mask is the triangle within each chunk, and every other part is a full rectangle. Parts
are put together by the logarithms of their denominators (arXiv 1805.02867): the matrix of scores never exists, nor does
a mask.

Shapes: what travels and what is stored lies as [batch, seq, heads, head_dim]; kernels see its transposed view.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from titanlab.parallelism.attention_kernels import Gradients, Kernel

Pair = tuple[Tensor, Tensor]  # keys and values, or their gradients


class Block(NamedTuple):
    """Keys and values of other ranks, [batch, seq, kv_heads, head_dim] each.

    later: they are of ranks after this one, so that only the local tail attends to them; otherwise all rows do.
    """

    k: Tensor
    v: Tensor
    later: bool


class Exchange(Protocol):
    """How keys and values meet queries. It sets off when it is made, so that local work hides the first transfer."""

    def blocks(self) -> Iterator[Block]:
        """What the local rows need of other ranks, each key once. The next is under way while one is used."""
        ...

    def give(self, gradients: Pair, into: Pair) -> None:
        """Send home the gradients of the block that came last, shaped as its k and v.

        What has arrived for this rank's own keys may be added to `into`, [batch, seq, kv_heads, head_dim] each.
        """
        ...

    def collect(self, into: Pair) -> None:
        """Wait for all that other ranks gave for this rank's keys, and add what was not added yet."""
        ...


def forward(exchange: Exchange, q: Tensor, k: Tensor, v: Tensor, kernel: Kernel) -> tuple[Tensor, Tensor]:
    """Attention of the local rows to all keys before them.

    Args:
        q: [batch, seq, heads, head_dim], contiguous; k, v: with kv_heads.

    Returns:
        The output [batch, seq, heads, head_dim] in q's type, and the rows' denominators [batch, seq, heads], float32.
    """
    half = q.shape[1] // 2
    out, lse = (_whole(x, q.shape[0]) for x in _forward(kernel, _halves(q), _halves(k), _halves(v), causal=True))
    # Partial outputs are added in float32: rounding to 16 bits anew with every part would add up.
    out = out.to(accumulator(q.dtype))
    _merge(out[:, half:], lse[:, half:], *_forward(kernel, q[:, half:], k[:, :half], v[:, :half]))
    for block in exchange.blocks():
        first = half if block.later else 0
        _merge(out[:, first:], lse[:, first:], *_forward(kernel, q[:, first:], block.k, block.v))
        del block  # before the next is made room for
    return out.to(q.dtype), lse


def backward(
    exchange: Exchange, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kernel: Kernel
) -> Gradients:
    """Gradients of q, k and v, shaped as they are; keys and values travel once more.

    The last part needs nothing of others: it hides the way home of the last gradients.
    """
    half, total = q.shape[1] // 2, accumulator(q.dtype)
    rows = _Rows(grad, q, out, lse)
    tail = rows.each(lambda x: x[:, half:])
    parts = _backward(kernel, rows.each(_halves), _halves(k), _halves(v), causal=True)
    dq, dk, dv = (_whole(x, q.shape[0]).to(total) for x in parts)
    for block in exchange.blocks():
        part_q, part_k, part_v = _backward(kernel, tail if block.later else rows, block.k, block.v)
        exchange.give((part_k, part_v), into=(dk, dv))
        dq[:, half if block.later else 0 :] += part_q
        del block, part_q, part_k, part_v  # before the next are made room for
    part_q, part_k, part_v = _backward(kernel, tail, k[:, :half], v[:, :half])
    dq[:, half:] += part_q
    dk[:, :half] += part_k
    dv[:, :half] += part_v
    exchange.collect(into=(dk, dv))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


class _Rows(NamedTuple):
    """What the backward pass needs of queries: [batch, rows, heads, head_dim], and lse without its last dim."""

    grad: Tensor
    q: Tensor
    out: Tensor
    lse: Tensor

    def each(self, function: Callable[[Tensor], Tensor]) -> _Rows:
        return _Rows(*map(function, self))


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """What sums of values of this type are kept in."""
    return torch.promote_types(dtype, torch.float32)


def _forward(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> tuple[Tensor, Tensor]:
    out, lse = kernel.forward(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal)
    return out.transpose(1, 2), lse.transpose(1, 2)


def _backward(kernel: Kernel, rows: _Rows, k: Tensor, v: Tensor, *, causal: bool = False) -> Gradients:
    grad, q, out, lse, k, v = (x.transpose(1, 2) for x in (*rows, k, v))
    dq, dk, dv = kernel.backward(grad, q, k, v, out, lse, causal=causal)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _halves(x: Tensor) -> Tensor:
    """Each half of a sequence as a sequence of its own: [batch, seq, …] → [2·batch, seq/2, …], without a copy."""
    return x.reshape(2 * x.shape[0], x.shape[1] // 2, *x.shape[2:])


def _whole(x: Tensor, batch: int) -> Tensor:
    """The inverse of `_halves`; contiguous, whatever the kernel's layout."""
    return x.reshape(batch, 2 * x.shape[1], *x.shape[2:]).contiguous()


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Put attention to more keys into `out` [batch, rows, heads, head_dim] and `lse` [batch, rows, heads], in place.

    The new part's share of the denominator, exp(b) / (exp(a) + exp(b)), is a sigmoid: it cannot overflow.
    """
    out.lerp_(part.to(out.dtype), torch.sigmoid(part_lse - lse).unsqueeze(-1))
    torch.logaddexp(lse, part_lse, out=lse)
