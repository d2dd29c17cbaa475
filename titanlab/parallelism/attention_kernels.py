"""Attention kernels that also return the logarithm of the softmax's denominator, so that partial results can be merged.

All kernels take q [batch, heads, rows, head_dim] and k, v [batch, kv_heads, keys, head_dim], contiguous in the last
dim, and scale by 1/√head_dim. The kernels call the ATen operators behind `scaled_dot_product_attention`, because no
public function runs the backward pass over a part of the keys with the denominators over all keys. torch's own context
parallelism (torch/distributed/tensor/experimental/_context_parallel) calls the same operators, in torch 2.11 to 2.13.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import (
    SDPAParams,
    can_use_cudnn_attention,
    can_use_efficient_attention,
    can_use_flash_attention,
)

from titanlab.costs import FLASH3, order
from titanlab.techniques.model.attention import (
    ROWS_OF_TILE,
    by_token,
    choose_flash,
    tiled_attention,
    tiled_attention_backward,
)

aten = torch.ops.aten

Gradients = tuple[Tensor, Tensor, Tensor]


class AttentionKernel(NamedTuple):
    """One attention kernel. `causal` masks, for each row, the keys with a larger index; it needs as many keys as rows.

    Attributes:
        forward: (q, k, v, causal=) → the output, shaped as q, and log Σ exp(scores) of every row: float32
            [batch, heads, rows].
        backward: (grad, q, k, v, out, lse, causal=) → the gradients of q, k and v from these keys only, given `out` and
            `lse` over all keys of each row.
        is_tiled: whether one call computes all documents, in tiles; otherwise each document needs its own call.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., Gradients]
    is_tiled: bool = False

    def documents_forward(self, q: Tensor, k: Tensor, v: Tensor, *, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Causal `forward` within documents. `starts` [batch, rows], on the CPU: first row of each row's document."""
        if self.is_tiled:
            out, lse = tiled_attention(q, k, v, starts, ROWS_OF_TILE)
            return out, lse
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
        for piece in _documents(starts):
            out[piece], lse[piece] = self.forward(q[piece], k[piece], v[piece], causal=True)
        return out, lse

    def documents_backward(self, *inputs: Tensor, starts: Tensor) -> Gradients:
        """Causal `backward` within documents; `starts` as for `documents_forward`."""
        grad, q, k, v, out, lse = inputs
        if self.is_tiled:
            dq, dk, dv = tiled_attention_backward(grad, q, k, v, starts, out, lse, ROWS_OF_TILE)
            return dq, dk, dv
        whole = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for piece in _documents(starts):
            parts = self.backward(*(x[piece] for x in inputs), causal=True)
            for gradient, part in zip(whole, parts, strict=True):
                gradient[piece] = part
        return whole


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, 0.0, causal)
    return out, lse


def _cpu_backward(*inputs: Tensor, causal: bool) -> Gradients:
    grad, q, k, v, out, lse = inputs
    op = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    dq, dk, dv = op(grad, q, k, v, out, lse, 0.0, causal)
    return dq, dk, dv


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_flash_attention.default(q, k, v, 0.0, causal)
    return out, lse


def _flash_backward(*inputs: Tensor, causal: bool) -> Gradients:
    grad, q, k, v, out, lse = inputs
    op = aten._scaled_dot_product_flash_attention_backward.default
    rows, keys, seed = q.shape[2], k.shape[2], _no_seed(q)
    # The two None are for ragged sequences only; the seeds are for dropout only.
    dq, dk, dv = op(grad, q, k, v, out, lse.contiguous(), None, None, rows, keys, 0.0, causal, seed, seed)
    return dq, dk, dv


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention.default(q, k, v, None, True, 0.0, causal)
    # cuDNN's denominators have an extra last dim of 1.
    return out, lse.reshape(q.shape[:3])


def _cudnn_backward(*inputs: Tensor, causal: bool) -> Gradients:
    grad, q, k, v, out, lse = inputs
    op = aten._scaled_dot_product_cudnn_attention_backward.default
    rows, keys, seed = q.shape[2], k.shape[2], _no_seed(q)
    lse = lse.contiguous().unsqueeze(-1)
    # torch caches kernels by the strides of q, k and v only, so `grad` and `out` need one fixed layout.
    grad, out = by_token(grad), by_token(out)
    dq, dk, dv = op(grad, q, k, v, out, lse, seed, seed, None, None, None, rows, keys, 0.0, causal)
    return dq, dk, dv


# The memory-efficient kernel needs repeated key/value heads, and `lse` padded to a multiple of this number of rows.
_EFFICIENT_ROWS = 32


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    k, v = (repeated(x, q.shape[1]) for x in (k, v))
    out, lse, *_ = aten._scaled_dot_product_efficient_attention.default(q, k, v, None, True, 0.0, causal)
    return out, lse[:, :, : q.shape[2]]


def _efficient_backward(*inputs: Tensor, causal: bool) -> Gradients:
    grad, q, k, v, out, lse = inputs
    op = aten._scaled_dot_product_efficient_attention_backward.default
    kv_heads, seed, needs_grad = k.shape[1], _no_seed(q), [True, True, True, False]
    k, v = (repeated(x, q.shape[1]) for x in (k, v))
    # exp(score − ∞) is 0, so padded rows add nothing.
    lse = F.pad(lse, (0, -lse.shape[2] % _EFFICIENT_ROWS), value=float("inf")).contiguous()
    dq, dk, dv, _ = op(grad, q, k, v, None, out, lse, seed, seed, 0.0, needs_grad, causal)
    return dq, summed(dk, kv_heads), summed(dv, kv_heads)


def repeated(x: Tensor, heads: int) -> Tensor:
    """Key/value heads repeated for the query heads that share them: [batch, kv_heads, …] → [batch, heads, …]."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def summed(x: Tensor, kv_heads: int) -> Tensor:
    """The gradient of `repeated`: sums over the query heads that share a key/value head."""
    return x if x.shape[1] == kv_heads else x.unflatten(1, (kv_heads, -1)).sum(2)


# Supports float32, bfloat16, float16 and grouped-query heads.
CPU = AttentionKernel(_cpu_forward, _cpu_backward, is_tiled=True)
# FlashAttention-2 (arXiv 2307.08691), or FlashAttention 3 if it is active: supports 16 bits and grouped-query heads.
_FLASH = AttentionKernel(_flash_forward, _flash_backward)
KERNELS = {
    "flash": _FLASH,
    FLASH3: _FLASH,
    # Supports 16 bits and grouped-query heads.
    "cudnn": AttentionKernel(_cudnn_forward, _cudnn_backward),
    # Memory-efficient attention (arXiv 2112.05682): supports 16 bits and float32, not grouped-query heads.
    "efficient": AttentionKernel(_efficient_forward, _efficient_backward),
}


def _can_use_flash(inputs: SDPAParams) -> bool:
    # SDPA pads head_dim to a multiple of 8 before it calls the operator. This module does not pad.
    return bool(inputs.query.shape[-1] % 8 == 0 and can_use_flash_attention(inputs))


_CAN_USE: dict[str, Callable[[SDPAParams], bool]] = {
    **dict.fromkeys(("flash", FLASH3), _can_use_flash),
    "cudnn": can_use_cudnn_attention,
    "efficient": can_use_efficient_attention,
}


def choose(name: str, q: Tensor, k: Tensor, v: Tensor, *, shapes_vary: bool = False) -> AttentionKernel:
    """The kernel for these inputs: the requested kernel if it supports them, else the next one in `order` that does.

    Args:
        name: `flash`, `flash3`, `cudnn`, `efficient`, or `auto`: the fastest that supports the inputs (`efficient` for
            32 bits). On CPU there is only one kernel.
        shapes_vary: whether the numbers of rows and keys change from call to call. Then cuDNN is not chosen, because it
            makes a plan for each shape.

    Raises:
        RuntimeError: no kernel of this device supports the inputs.
        ImportError: `flash3` is not installed.
    """
    if q.device.type == "cpu":
        return CPU
    capability = torch.cuda.get_device_capability(q.device) if q.device.type == "cuda" else None
    has_flash3 = capability is not None and choose_flash(name, capability)
    dtype, (*_, seq_len, head_dim) = str(q.dtype).removeprefix("torch."), q.shape
    names = order(name, capability, dtype=dtype, head_dim=head_dim, seq_len=seq_len, has_flash3=has_flash3)
    for candidate in names:
        if shapes_vary and candidate == "cudnn":
            continue
        shared = candidate != "efficient" and q.shape[1] != k.shape[1]
        # A kernel without grouped-query heads will get `repeated` k and v; this check needs only views of that shape.
        takes_heads = shared or q.shape[1] == k.shape[1]
        k_, v_ = (k, v) if takes_heads else (x[:, :1].expand(-1, q.shape[1], -1, -1) for x in (k, v))
        if _CAN_USE[candidate](SDPAParams(q, k_, v_, None, 0.0, False, shared)):
            return KERNELS[candidate]
    raise RuntimeError(
        f"no attention kernel of {q.device.type} takes {q.dtype} with a head_dim of {q.shape[-1]}; "
        "fused kernels need a device of compute capability 8.0 or more and a head_dim that is a multiple of 8"
    )


def _documents(starts: Tensor) -> Iterator[tuple[slice, slice, slice]]:
    """For each document, the index that selects its rows in a tensor [batch, heads, rows, …]."""
    for sequence, begins in enumerate(starts.tolist()):
        begin = 0
        while begin < len(begins):
            end = bisect_right(begins, begins[begin], lo=begin)
            yield slice(sequence, sequence + 1), slice(None), slice(begin, end)
            begin = end


def _no_seed(q: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=q.device)
