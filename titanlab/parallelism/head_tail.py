"""Causal attention of one rank's two chunks of a sequence, in parts that need no mask, while keys are transferred.

With n ranks a sequence is cut into 2n chunks, and rank r has chunks r (its head) and 2n−1−r (its tail), so that every
rank has the same work. For the keys of other ranks:

- an *earlier* rank s < r: its head comes before all local rows, its tail after all of them;
- a *later* rank s > r: both its chunks come before the local tail and after the local head.

So the causal mask is needed only within each chunk, and every other part is a full rectangle. Partial results are
merged by the logarithms of their denominators (arXiv 1805.02867): no matrix of scores and no mask is ever stored.

Shapes: tensors are sent and stored as [batch, seq, heads, head_dim]; kernels get the transposed view.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from titanlab.parallelism.attention_kernels import AttentionKernel, Gradients

Pair = tuple[Tensor, Tensor]  # keys and values, or their gradients


class KeysAndValues(NamedTuple):
    """Keys and values of other ranks, [batch, seq, kv_heads, head_dim] each.

    later: they belong to ranks after this one, so that only the local tail attends to them; otherwise all rows do.
    chunks: numbers of the sequence's chunks whose keys these are, in their order here
    """

    k: Tensor
    v: Tensor
    later: bool
    chunks: tuple[int, ...]


class KeyValueTransfer(Protocol):
    """A transfer of keys and values; the constructor starts it, so that local work hides the first transfer."""

    def blocks(self) -> Iterator[KeysAndValues]:
        """The keys and values of other ranks that local rows need, once each; the next block is in transfer."""
        ...

    def give(self, gradients: Pair, into: Pair) -> None:
        """Send the gradients of the latest block, shaped as its k and v, to the rank that owns it.

        Gradients that have arrived for this rank's keys may be added to `into`, [batch, seq, kv_heads, head_dim] each.
        """
        ...

    def collect(self, into: Pair) -> None:
        """Wait for all gradients of this rank's keys from other ranks, and add the rest of them to `into`."""
        ...


def owned(rank: int, ranks: int) -> tuple[int, int]:
    """The numbers of a rank's chunks, its head and its tail."""
    return rank, 2 * ranks - 1 - rank


def forward(
    exchange: KeyValueTransfer, q: Tensor, k: Tensor, v: Tensor, kernel: AttentionKernel
) -> tuple[Tensor, Tensor]:
    """Attention of the local rows to all keys before them.

    Args:
        q: [batch, seq, heads, head_dim], contiguous; k, v: with kv_heads.

    Returns:
        The output [batch, seq, heads, head_dim] in q's dtype, and the logarithms of the rows' denominators
        [batch, seq, heads], float32.
    """
    half = q.shape[1] // 2
    out, lse = (joined_halves(x, q.shape[0]) for x in _forward(kernel, halves(q), halves(k), halves(v), causal=True))
    # Partial outputs are added in float32: the errors of rounding every sum to 16 bits would add up.
    out = out.to(accumulator(q.dtype))
    merge(out[:, half:], lse[:, half:], *_forward(kernel, q[:, half:], k[:, :half], v[:, :half]))
    for block in exchange.blocks():
        first = half if block.later else 0
        merge(out[:, first:], lse[:, first:], *_forward(kernel, q[:, first:], block.k, block.v))
        del block  # before memory for the next is allocated
    return out.to(q.dtype), lse


def backward(
    exchange: KeyValueTransfer,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    kernel: AttentionKernel,
) -> Gradients:
    """Gradients of q, k and v, shaped as q, k and v; keys and values are transferred once more.

    The last part needs only local keys: it hides the transfer of the last gradients.
    """
    half, total = q.shape[1] // 2, accumulator(q.dtype)
    rows = _Rows(grad, q, out, lse)
    tail = rows.map(lambda x: x[:, half:])
    parts = _backward(kernel, rows.map(halves), halves(k), halves(v), causal=True)
    dq, dk, dv = (joined_halves(x, q.shape[0]).to(total) for x in parts)
    for block in exchange.blocks():
        part_q, part_k, part_v = _backward(kernel, tail if block.later else rows, block.k, block.v)
        exchange.give((part_k, part_v), into=(dk, dv))
        dq[:, half if block.later else 0 :] += part_q
        del block, part_q, part_k, part_v  # before memory for the next is allocated
    part_q, part_k, part_v = _backward(kernel, tail, k[:, :half], v[:, :half])
    dq[:, half:] += part_q
    dk[:, :half] += part_k
    dv[:, :half] += part_v
    exchange.collect(into=(dk, dv))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


class _Rows(NamedTuple):
    """Tensors per query row for the backward pass: [batch, rows, heads, head_dim]; lse has no last dim."""

    grad: Tensor
    q: Tensor
    out: Tensor
    lse: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> _Rows:
        return _Rows(*map(function, self))


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of this dtype are summed."""
    return torch.promote_types(dtype, torch.float32)


def _forward(
    kernel: AttentionKernel, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False
) -> tuple[Tensor, Tensor]:
    out, lse = kernel.forward(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal)
    return out.transpose(1, 2), lse.transpose(1, 2)


def _backward(kernel: AttentionKernel, rows: _Rows, k: Tensor, v: Tensor, *, causal: bool = False) -> Gradients:
    grad, q, out, lse, k, v = (x.transpose(1, 2) for x in (*rows, k, v))
    dq, dk, dv = kernel.backward(grad, q, k, v, out, lse, causal=causal)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def halves(x: Tensor) -> Tensor:
    """The halves of each sequence as separate sequences: [batch, seq, …] → [2·batch, seq/2, …], without a copy."""
    return x.reshape(2 * x.shape[0], x.shape[1] // 2, *x.shape[2:])


def joined_halves(x: Tensor, batch: int) -> Tensor:
    """The inverse of `halves`, contiguous."""
    return x.reshape(batch, 2 * x.shape[1], *x.shape[2:]).contiguous()


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge attention to more keys into `out` [batch, rows, heads, head_dim] and `lse` [batch, rows, heads], in place.

    The new part's share of the denominator, exp(b) / (exp(a) + exp(b)), is a sigmoid: it cannot overflow.
    """
    out.lerp_(part.to(out.dtype), torch.sigmoid(part_lse - lse).unsqueeze(-1))
    torch.logaddexp(lse, part_lse, out=lse)


class Chunks:
    """A rank's two chunks, and the documents in them.

    A document is one piece of a sequence, so one at most reaches from an earlier chunk into a later one: the document
    of the later chunk's first row. The later chunk's first rows, as far as they are of that document, attend to all of
    its keys in the earlier chunk, which are that chunk's last. So all work between two chunks is a full rectangle,
    without a mask and without rows that attend to nothing; and where the document does not reach, there is nothing to
    compute. Within a chunk, each document is causal attention by itself.

    Keys, values and gradients are transferred as without documents, whatever is computed: no rank waits for a message
    that another does not send.

    Args:
        starts: [batch, seq] int64, on the CPU: the place in the whole sequence of the first token of each local token's
            document.
        rank, ranks: of the context axis.
    """

    def __init__(self, starts: Tensor, *, rank: int, ranks: int) -> None:
        self._numbers = owned(rank, ranks)
        self.size = starts.shape[1] // 2
        self._starts: list[list[int]] = starts.tolist()
        # Of each half by itself: what began in an earlier chunk begins with the chunk.
        begins = torch.tensor(self._numbers * starts.shape[0]).unsqueeze(1) * self.size
        self.inner = (halves(starts) - begins).clamp(min=0)

    @property
    def head(self) -> int:
        """The number of the first chunk."""
        return self._numbers[0]

    def rectangles(self, block: KeysAndValues) -> Iterator[Rectangle]:
        """What local rows attend to in a block of keys."""
        for sequence, starts in enumerate(self._starts):
            for half, number in enumerate(self._numbers):
                begin = half * self.size
                first = starts[begin]
                keys = tuple(
                    slice(place * self.size + max(first - other * self.size, 0), (place + 1) * self.size)
                    for place, other in enumerate(block.chunks)
                    if other < number and (other + 1) * self.size > first
                )
                if keys:
                    end = bisect_right(starts, first, lo=begin, hi=begin + self.size)
                    yield Rectangle(sequence, slice(begin, end), keys)


class Rectangle(NamedTuple):
    """Local rows of one sequence, all of which attend to all of these keys of a block.

    sequence: its place in the batch
    rows: of the local tokens
    keys: slices of the block's keys
    """

    sequence: int
    rows: slice
    keys: tuple[slice, ...]

    def own(self, x: Tensor) -> Tensor:
        """The rows' part of a tensor of all local rows, as a view [1, rows, …]."""
        return x[self.sequence : self.sequence + 1, self.rows]

    def of_block(self, x: Tensor) -> Tensor:
        """The keys' part of a block's tensor, [1, keys, …]."""
        parts = [x[self.sequence : self.sequence + 1, keys] for keys in self.keys]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def add(self, part: Tensor, into: Tensor) -> None:
        """Add gradients shaped as the result of `of_block` to those of the block."""
        sizes = [keys.stop - keys.start for keys in self.keys]
        for keys, piece in zip(self.keys, part.split(sizes, dim=1), strict=True):
            into[self.sequence : self.sequence + 1, keys] += piece


def forward_within(
    exchange: KeyValueTransfer, q: Tensor, k: Tensor, v: Tensor, kernel: AttentionKernel, chunks: Chunks
) -> tuple[Tensor, Tensor]:
    """As `head_tail.forward`, within documents."""
    local = (_heads_first(halves(x)) for x in (q, k, v))
    parts = kernel.documents_forward(*local, starts=chunks.inner)
    out, lse = (joined_halves(_sequence_first(x), q.shape[0]) for x in parts)
    out = out.to(accumulator(q.dtype))
    for block in _blocks(exchange, k, v, chunks):
        for rectangle in chunks.rectangles(block):
            inputs = (rectangle.own(q), rectangle.of_block(block.k), rectangle.of_block(block.v))
            part, part_lse = kernel.forward(*map(_heads_first, inputs), causal=False)
            merge(rectangle.own(out), rectangle.own(lse), _sequence_first(part), _sequence_first(part_lse))
        del block  # before memory for the next is allocated
    return out.to(q.dtype), lse


def backward_within(
    exchange: KeyValueTransfer,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    kernel: AttentionKernel,
    chunks: Chunks,
) -> Gradients:
    """As `head_tail.backward`, within documents."""
    rows = (grad, q, out, lse)
    parts = kernel.documents_backward(
        *(_heads_first(halves(x)) for x in (grad, q, k, v, out, lse)), starts=chunks.inner
    )
    dq, dk, dv = (joined_halves(_sequence_first(x), q.shape[0]).to(accumulator(q.dtype)) for x in parts)
    for block in exchange.blocks():
        gradients = torch.zeros_like(block.k), torch.zeros_like(block.v)
        _add_gradients(chunks, block, rows, kernel, dq, *gradients)
        exchange.give(gradients, into=(dk, dv))
        del block, gradients  # before memory for the next is allocated
    # The last part needs only local keys: it hides the transfer of the last gradients.
    size = chunks.size
    _add_gradients(chunks, _local(k, v, chunks), rows, kernel, dq, dk[:, :size], dv[:, :size])
    exchange.collect(into=(dk, dv))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _add_gradients(
    chunks: Chunks,
    block: KeysAndValues,
    rows: tuple[Tensor, Tensor, Tensor, Tensor],
    kernel: AttentionKernel,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> None:
    """Add the gradients from a block's keys: to those of all local rows, and to those of the block's keys."""
    for rectangle in chunks.rectangles(block):
        grad, q, out, lse = (_heads_first(rectangle.own(x)) for x in rows)
        k, v = (_heads_first(rectangle.of_block(x)) for x in (block.k, block.v))
        parts = kernel.backward(grad, q, k, v, out, lse, causal=False)
        part_q, part_k, part_v = map(_sequence_first, parts)
        rectangle.own(dq).add_(part_q)
        rectangle.add(part_k, dk)
        rectangle.add(part_v, dv)


def _blocks(exchange: KeyValueTransfer, k: Tensor, v: Tensor, chunks: Chunks) -> Iterator[KeysAndValues]:
    """The local head, which the tail attends to, and what is transferred meanwhile."""
    yield _local(k, v, chunks)
    yield from exchange.blocks()


def _local(k: Tensor, v: Tensor, chunks: Chunks) -> KeysAndValues:
    return KeysAndValues(k[:, : chunks.size], v[:, : chunks.size], later=False, chunks=(chunks.head,))


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def _sequence_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2)
