"""Causal attention on a CPU in tiles of queries, each of which meets only the keys up to its end.

torch's CPU kernel skips masked keys in blocks of 512, so that in a short sequence it computes nearly the whole square.
It is called here once for each tile, by one operator with its own backward: activation checkpointing, compilers and
counters of FLOPs see one attention, which saves what torch's saves. FLOPs count the whole square, as usual.

Which sizes are faster in tiles was measured by `benchmarks/attention_tiles.py`.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

torchs_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
torchs_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class Tiling(NamedTuple):
    """How attention is cut.

    rows: of queries in a tile
    in_float32: inputs are cast to float32, and results back
    """

    rows: int
    in_float32: bool


# The lengths of sequences, from and to, that are faster in tiles than with torch's kernel: for heads of 32, 64 and 128,
# shared or not, by benchmarks/results/attention_tiles.json. In bfloat16 torch's kernel packs all keys anew for every
# few rows, so that short sequences are faster in float32.
_LENGTHS = {torch.float32: (128, 1024), torch.bfloat16: (128, 767)}
_WIDEST_HEAD = 128
_FASTEST = Tiling(rows=64, in_float32=True)


def tiling(q: Tensor, k: Tensor, v: Tensor) -> Tiling | None:
    """The fastest tiling for q, k, v [batch, heads, seq, head_dim]; None: torch's kernel for the whole square."""
    if q.device.type != "cpu" or not (q.dtype == k.dtype == v.dtype and q.shape[2:] == k.shape[2:] == v.shape[2:]):
        return None
    first, last = _LENGTHS.get(q.dtype, (1, 0))
    return _FASTEST if first <= q.shape[2] <= last and q.shape[3] <= _WIDEST_HEAD else None


def result_like(x: Tensor) -> Tensor:
    """An empty tensor shaped as x, with the strides of torch's results: [batch, seq, heads, head_dim] in memory."""
    return torch.empty_like(x.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)


def denominators_of(q: Tensor) -> Tensor:
    """An empty tensor for the logarithms of the denominators: float32 [batch, heads, seq]."""
    batch, heads, seq_len, _ = q.shape
    return q.new_empty((batch, seq_len, heads), dtype=torch.float32).transpose(1, 2)


def register_attention(name: str) -> None:
    """Tell torch what operators `titanlab::NAME` and `titanlab::NAME_backward` return, and how many FLOPs they are.

    The first takes q, k, v, the second the output's gradient and q, k, v; other arguments may follow.

    FLOPs are two products of the whole square forward and five backward, as torch counts its own kernels.
    """

    def results(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        return result_like(q), denominators_of(q)

    def gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
        return result_like(q), result_like(k), result_like(v)

    for operator, fake, products in ((name, results, 2), (f"{name}_backward", gradients, 5)):
        torch.library.register_fake(f"titanlab::{operator}", fake)
        register_flop_formula(getattr(torch.ops.titanlab, operator))(functools.partial(_flops, products))


def _flops(products: int, shape: tuple[int, ...], *_: Any, **__: Any) -> int:
    return products * 2 * math.prod(shape) * shape[2]


@torch.library.custom_op("titanlab::tiled_attention", mutates_args=())
def tiled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: int,
    in_float32: bool,  # noqa: FBT001 (operators take no keywords)
) -> tuple[Tensor, Tensor]:
    """Causal softmax(q·kᵀ/√head_dim)·v, and the logarithms of the denominators.

    Args:
        q: [batch, heads, seq, head_dim]; k and v have kv_heads, which divide the heads.
        rows, in_float32: see `Tiling`.

    Returns:
        output shaped as q, in memory [batch, seq, heads, head_dim]; [batch, heads, seq] float32.
    """
    out, lse = result_like(q), denominators_of(q)
    if in_float32:
        q, k, v = q.float(), k.float(), v.float()
    mask = _mask(q, rows)
    for start, end in _tiles(q, rows):
        tile, keys = slice(start, end), slice(end)
        out[:, :, tile], lse[:, :, tile] = torchs_forward(
            q[:, :, tile], k[:, :, keys], v[:, :, keys], 0.0, start == 0, attn_mask=_part(mask, start, end)
        )
    return out, lse


@torch.library.custom_op("titanlab::tiled_attention_backward", mutates_args=())
def tiled_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    rows: int,
    in_float32: bool,  # noqa: FBT001
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    dq, dtype = result_like(q), q.dtype
    if in_float32:
        grad, q, k, v, out = (x.float() for x in (grad, q, k, v, out))
    mask, sums = _mask(q, rows), list[Tensor]()
    # The last tile meets all keys, so the others add to its gradients of keys and values.
    for start, end in reversed(_tiles(q, rows)):
        tile, keys = slice(start, end), slice(end)
        inputs = (grad[:, :, tile], q[:, :, tile], k[:, :, keys], v[:, :, keys], out[:, :, tile], lse[:, :, tile])
        dq[:, :, tile], *parts = torchs_backward(*inputs, 0.0, start == 0, attn_mask=_part(mask, start, end))
        if sums:
            for total, part in zip(sums, parts, strict=True):
                total[:, :, keys] += part
        else:
            sums = parts
    dk, dv = (total.to(dtype) for total in sums)
    return dq, dk, dv


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *ctx.tiling = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 5
    return *tiled_attention_backward(grad, *ctx.saved_tensors, *ctx.tiling), None, None


register_attention("tiled_attention")
tiled_attention.register_autograd(_differentiate, setup_context=_keep)


def _tiles(q: Tensor, rows: int) -> list[tuple[int, int]]:
    """First row and end of each tile."""
    seq_len = q.shape[2]
    return [(start, min(start + rows, seq_len)) for start in range(0, seq_len, rows)]


def _mask(q: Tensor, rows: int) -> Tensor:
    """What is added to the scores of the last tile, if it is full: [rows, keys]."""
    last = _tiles(q, rows)[-1][0]
    return torch.triu(torch.full((rows, last + rows), -math.inf, dtype=q.dtype, device=q.device), last + 1)


def _part(mask: Tensor, start: int, end: int) -> Tensor | None:
    """The part of `_mask` for a tile; the first one is causal by itself."""
    last = mask.shape[1] - mask.shape[0]
    return mask[: end - start, last - start : last - start + end] if start else None
