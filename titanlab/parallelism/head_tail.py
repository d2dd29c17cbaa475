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
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from titanlab.parallelism.attention_kernels import AttentionKernel, Gradients

Pair = tuple[Tensor, Tensor]  # keys and values, or their gradients


class KeysAndValues(NamedTuple):
    """Keys and values of other ranks, [batch, seq, kv_heads, head_dim] each.

    later: only the local tail attends to them: they belong to ranks after this one, or to the local head; otherwise
        all rows do.
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
    """The numbers of a rank's chunks: its head and its tail."""
    return rank, 2 * ranks - 1 - rank


def forward(
    exchange: KeyValueTransfer,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kernel: AttentionKernel,
    documents: DocumentChunks | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of the local rows to all keys before them, or to those of their documents.

    Args:
        q: [batch, seq, heads, head_dim], contiguous; k, v: with kv_heads.

    Returns:
        The output [batch, seq, heads, head_dim] in q's dtype, and the logarithms of the rows' denominators
        [batch, seq, heads], float32.
    """
    local = [_swapped(halves(x)) for x in (q, k, v)]
    if documents is None:
        parts = kernel.forward(*local, causal=True)
    else:
        parts = kernel.documents_forward(*local, starts=documents.inner)
    out, lse = (_joined_halves(_swapped(x), q.shape[0]) for x in parts)
    # Partial outputs are added in float32: the errors of rounding every sum to 16 bits would add up.
    out = out.to(accumulator(q.dtype))

    def attend(block: KeysAndValues) -> None:
        for rectangle in rectangles(block, q, documents):
            inputs = rectangle.rows_of(q), rectangle.keys_of(block.k), rectangle.keys_of(block.v)
            part, part_lse = kernel.forward(*map(_swapped, inputs), causal=False)
            merge(rectangle.rows_of(out), rectangle.rows_of(lse), _swapped(part), _swapped(part_lse))

    attend(_local_head(k, v, documents))
    for block in exchange.blocks():
        attend(block)
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
    documents: DocumentChunks | None = None,
) -> Gradients:
    """Gradients of q, k and v, shaped as q, k and v; keys and values are transferred once more."""
    local = [_swapped(halves(x)) for x in (grad, q, k, v, out, lse)]
    if documents is None:
        parts = kernel.backward(*local, causal=True)
    else:
        parts = kernel.documents_backward(*local, starts=documents.inner)
    dq, dk, dv = (_joined_halves(_swapped(x), q.shape[0]).to(accumulator(q.dtype)) for x in parts)

    def add_gradients(block: KeysAndValues, into: Pair) -> None:
        """Add the gradients from a block's keys to those of local rows, and to those of the block."""
        for rectangle in rectangles(block, q, documents):
            own_grad, own_q, own_out, own_lse = (_swapped(rectangle.rows_of(x)) for x in (grad, q, out, lse))
            keys, values = (_swapped(rectangle.keys_of(x)) for x in (block.k, block.v))
            parts = kernel.backward(own_grad, own_q, keys, values, own_out, own_lse, causal=False)
            of_rows, *of_keys = map(_swapped, parts)
            rectangle.rows_of(dq).add_(of_rows)
            for part, total in zip(of_keys, into, strict=True):
                rectangle.add_to_keys(part, total)

    for block in exchange.blocks():
        gradients = torch.zeros_like(block.k), torch.zeros_like(block.v)
        add_gradients(block, gradients)
        exchange.give(gradients, into=(dk, dv))
        del block, gradients  # before memory for the next is allocated
    # The last part needs only local keys: it hides the transfer of the last gradients.
    half = q.shape[1] // 2
    add_gradients(_local_head(k, v, documents), (dk[:, :half], dv[:, :half]))
    exchange.collect(into=(dk, dv))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _local_head(k: Tensor, v: Tensor, documents: DocumentChunks | None) -> KeysAndValues:
    half = k.shape[1] // 2
    chunks = () if documents is None else documents.numbers[:1]
    return KeysAndValues(k[:, :half], v[:, :half], later=True, chunks=chunks)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of this dtype are summed."""
    return torch.promote_types(dtype, torch.float32)


def halves(x: Tensor) -> Tensor:
    """The halves of each sequence as separate sequences: [batch, seq, …] → [2·batch, seq/2, …], without a copy."""
    return x.reshape(2 * x.shape[0], x.shape[1] // 2, *x.shape[2:])


def _joined_halves(x: Tensor, batch: int) -> Tensor:
    """The inverse of `halves`, contiguous."""
    return x.reshape(batch, 2 * x.shape[1], *x.shape[2:]).contiguous()


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge attention to more keys into `out` [batch, rows, heads, head_dim] and `lse` [batch, rows, heads], in place.

    The new part's share of the denominator, exp(b) / (exp(a) + exp(b)), is a sigmoid: it cannot overflow.
    """
    out.lerp_(part.to(out.dtype), torch.sigmoid(part_lse - lse).unsqueeze(-1))
    torch.logaddexp(lse, part_lse, out=lse)


class DocumentChunks:
    """The documents in a rank's two chunks.

    At most one document reaches from an earlier chunk into a later one: that of the later chunk's first row. The later
    chunk's first rows, as far as they are of that document, attend to all of its keys in the earlier chunk, which are
    that chunk's last. So the work between two chunks is a full rectangle without a mask, or nothing. Within a chunk,
    each document is causal attention by itself.

    Keys, values and gradients are transferred as without documents, whatever is computed: no rank waits for a message
    that another does not send.

    Args:
        starts: [batch, seq] int64, on the CPU: the place in the whole sequence of the first token of each local token's
            document.
        rank, ranks: of the context axis.
    """

    def __init__(self, starts: Tensor, *, rank: int, ranks: int) -> None:
        self.numbers = owned(rank, ranks)
        self._size = starts.shape[1] // 2
        self._starts: list[list[int]] = starts.tolist()
        # The starts within each half: a document that began in an earlier chunk begins with this chunk.
        begins = torch.tensor(self.numbers * starts.shape[0]).unsqueeze(1) * self._size
        self.inner = (halves(starts) - begins).clamp(min=0)

    def rectangles(self, block: KeysAndValues) -> Iterator[Rectangle]:
        """What local rows attend to in a block of keys."""
        size = self._size
        for sequence, starts in enumerate(self._starts):
            for half, number in enumerate(self.numbers):
                begin = half * size
                first = starts[begin]
                keys = tuple(
                    slice(place * size + max(first - other * size, 0), (place + 1) * size)
                    for place, other in enumerate(block.chunks)
                    if other < number and (other + 1) * size > first
                )
                if keys:
                    end = bisect_right(starts, first, lo=begin, hi=begin + size)
                    yield Rectangle(slice(sequence, sequence + 1), slice(begin, end), keys)


class Rectangle(NamedTuple):
    """Local rows of some sequences of the batch, all of which attend to all of these keys of a block."""

    sequences: slice
    rows: slice
    keys: tuple[slice, ...]

    def rows_of(self, x: Tensor) -> Tensor:
        """The rows' part of a tensor of all local rows, as a view."""
        return x[self.sequences, self.rows]

    def keys_of(self, x: Tensor) -> Tensor:
        """The keys' part of a block's tensor, [sequences, keys, …]."""
        parts = [x[self.sequences, keys] for keys in self.keys]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def add_to_keys(self, part: Tensor, into: Tensor) -> None:
        """Add gradients shaped as the result of `keys_of` to those of the block."""
        sizes = [keys.stop - keys.start for keys in self.keys]
        for keys, piece in zip(self.keys, part.split(sizes, dim=1), strict=True):
            into[self.sequences, keys] += piece


def rectangles(block: KeysAndValues, q: Tensor, documents: DocumentChunks | None) -> Iterable[Rectangle]:
    """What local rows attend to in a block: without documents, the tail or all rows, to all keys."""
    if documents is not None:
        return documents.rectangles(block)
    batch, seq = q.shape[:2]
    first = seq // 2 if block.later else 0
    return [Rectangle(slice(0, batch), slice(first, seq), (slice(0, block.k.shape[1]),))]


def _swapped(x: Tensor) -> Tensor:
    """[batch, seq, heads, …] ↔ [batch, heads, seq, …]."""
    return x.transpose(1, 2)
