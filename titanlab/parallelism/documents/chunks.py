"""Attention within documents, of one rank's two chunks of a sequence (see `head_tail`).

A document is one piece of a sequence, so one at most reaches from an earlier chunk into a later one: the document of
the later chunk's first row. The later chunk's first rows, as far as they are of that document, attend to all of its
keys in the earlier chunk, which are that chunk's last. So all work between two chunks is a full rectangle, without a
mask and without rows that attend to nothing; and where the document does not reach, there is nothing to compute.
Within a chunk, each document is causal attention by itself.

Keys, values and gradients are transferred as without documents, whatever is computed: no rank waits for a message that
another does not send.

Shapes are those of `head_tail`. `starts` [batch, seq] int64, on the CPU, has the place in the whole sequence of the
first token of each local token's document.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from titanlab.parallelism.attention_kernels import Gradients, Kernel
from titanlab.parallelism.head_tail import Block, Exchange, accumulator, halves, joined_halves, merge, owned


class Chunks:
    """A rank's two chunks, and the documents in them.

    Args:
        starts: see the module.
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

    def rectangles(self, block: Block) -> Iterator[Rectangle]:
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


def forward(
    exchange: Exchange, q: Tensor, k: Tensor, v: Tensor, kernel: Kernel, chunks: Chunks
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


def backward(
    exchange: Exchange,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    kernel: Kernel,
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
    block: Block,
    rows: tuple[Tensor, Tensor, Tensor, Tensor],
    kernel: Kernel,
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


def _blocks(exchange: Exchange, k: Tensor, v: Tensor, chunks: Chunks) -> Iterator[Block]:
    """The local head, which the tail attends to, and what is transferred meanwhile."""
    yield _local(k, v, chunks)
    yield from exchange.blocks()


def _local(k: Tensor, v: Tensor, chunks: Chunks) -> Block:
    return Block(k[:, : chunks.size], v[:, : chunks.size], later=False, chunks=(chunks.head,))


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def _sequence_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2)
