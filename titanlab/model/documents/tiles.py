"""Attention within documents on a CPU: causal, and no row attends to a document before its own.

Sequences are packed: a row attends to the keys from its document's first token up to itself. Each document is cut into
tiles of queries, each of which meets only its document's keys up to the tile's end; several short documents share one
tile. As in `tiled_attention`, torch's kernel is called once for each tile, by one operator with its own backward, and
FLOPs count the whole square.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titanlab.model.tiled_attention import (
    Tiling,
    denominators_of,
    register_attention,
    result_like,
    torchs_backward,
    torchs_forward,
)

# Queries of a tile: of 32, 64, 128 and 256 the fastest for documents of any length, by benchmarks/document_masks.py.
_ROWS = 64


class Tile(NamedTuple):
    """Queries that are computed by one call: rows from `start` to `end`, which meet keys from `first` to `end`.

    shared: the rows are those of several documents, all of which begin in the tile
    last: no later tile meets these keys
    """

    first: int
    start: int
    end: int
    shared: bool
    last: bool


def tiling(q: Tensor) -> Tiling:
    """The fastest tiling for q [batch, heads, seq, head_dim].

    In 16 bits torch's kernel packs the keys anew for every few rows: float32 is faster.
    """
    return Tiling(rows=_ROWS, in_float32=q.dtype != torch.float64)


@torch.library.custom_op("titanlab::document_attention", mutates_args=())
def document_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    rows: int,
    in_float32: bool,  # noqa: FBT001 (operators take no keywords)
) -> tuple[Tensor, Tensor]:
    """softmax(q·kᵀ/√head_dim)·v over the keys from a row's document's first token up to the row, and log-sum-exps.

    Args:
        q: [batch, heads, seq, head_dim]; k and v have kv_heads, which divide the heads.
        starts: [batch, seq] int64, the place of the first token of each token's document.
        rows, in_float32: see `Tiling`.

    Returns:
        output shaped as q, in memory [batch, seq, heads, head_dim]; [batch, heads, seq] float32.
    """
    out, lse = result_like(q), denominators_of(q)
    if in_float32:
        q, k, v = q.float(), k.float(), v.float()
    triangle = _triangle(q, rows)
    for row, begins in enumerate(starts.tolist()):
        for tile in tiles(begins, rows):
            own, keys = _slices(row, tile)
            out[own], lse[own] = torchs_forward(
                q[own], k[keys], v[keys], 0.0, _is_causal(tile), attn_mask=_mask(triangle, starts[row], tile)
            )
    return out, lse


@torch.library.custom_op("titanlab::document_attention_backward", mutates_args=())
def document_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    out: Tensor,
    lse: Tensor,
    rows: int,
    in_float32: bool,  # noqa: FBT001
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    dq, dk, dv = result_like(q), result_like(k), result_like(v)
    if in_float32:
        grad, q, k, v, out = (x.float() for x in (grad, q, k, v, out))
    totals = [result_like(k), result_like(v)] if k.dtype != dk.dtype else [dk, dv]
    triangle = _triangle(q, rows)
    for row, begins in enumerate(starts.tolist()):
        # The last tile of a document meets all its keys, so the others add to its gradients of keys and values.
        for tile in reversed(list(tiles(begins, rows))):
            own, keys = _slices(row, tile)
            inputs = (grad[own], q[own], k[keys], v[keys], out[own], lse[own])
            mask = _mask(triangle, starts[row], tile)
            dq[own], *parts = torchs_backward(*inputs, 0.0, _is_causal(tile), attn_mask=mask)
            for total, part in zip(totals, parts, strict=True):
                if tile.last:
                    total[keys] = part
                else:
                    total[keys] += part
    if totals[0] is not dk:
        dk.copy_(totals[0])
        dv.copy_(totals[1])
    return dq, dk, dv


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.rows, ctx.in_float32 = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 6
    gradients = document_attention_backward(grad, *ctx.saved_tensors, ctx.rows, ctx.in_float32)
    return *gradients, None, None, None


register_attention("document_attention")
document_attention.register_autograd(_differentiate, setup_context=_keep)


def tiles(starts: list[int], rows: int) -> Iterator[Tile]:
    """Cut one sequence, whose rows' documents begin at `starts`, into tiles of up to `rows` rows, in order.

    A document of more than half a tile has tiles of its own.
    """
    seq_len, begin = len(starts), 0
    group = 0  # where the waiting group of short documents begins
    while begin < seq_len:
        end = _end(starts, begin)
        is_short = end - begin <= rows // 2
        if begin > group and not (is_short and end - group <= rows):
            yield Tile(group, group, begin, starts[begin - 1] != group, last=True)
            group = begin
        if not is_short:
            for start in range(begin, end, rows):
                yield Tile(begin, start, min(start + rows, end), False, last=start + rows >= end)
            group = end
        begin = end
    if seq_len > group:
        yield Tile(group, group, seq_len, starts[-1] != group, last=True)


def _end(starts: list[int], begin: int) -> int:
    """The end of the document that begins at `begin`."""
    return bisect_right(starts, starts[begin], lo=begin)


def _slices(row: int, tile: Tile) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    sequence, heads = slice(row, row + 1), slice(None)
    return (sequence, heads, slice(tile.start, tile.end)), (sequence, heads, slice(tile.first, tile.end))


def _is_causal(tile: Tile) -> bool:
    return tile.first == tile.start and not tile.shared


def _triangle(q: Tensor, rows: int) -> Tensor:
    """What is added to the scores of a full tile that meets a whole sequence: [rows, seq + rows]."""
    seq_len = q.shape[2]
    return torch.triu(torch.full((rows, seq_len + rows), -math.inf, dtype=q.dtype, device=q.device), seq_len + 1)


def _mask(triangle: Tensor, starts: Tensor, tile: Tile) -> Tensor | None:
    """What is added to the scores of a tile: [rows, keys]; None: it is causal by itself."""
    if _is_causal(tile):
        return None
    rows, keys, diagonal = tile.end - tile.start, tile.end - tile.first, triangle.shape[1] - triangle.shape[0]
    before = tile.start - tile.first
    mask = triangle[:rows, diagonal - before : diagonal - before + keys]
    if tile.shared:
        places = torch.arange(tile.first, tile.end)
        mask = mask.masked_fill(places < starts[tile.start : tile.end, None], -math.inf)
    return mask
