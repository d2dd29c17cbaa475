"""Causal attention with the kernel that a model's config names, also within the documents of packed sequences.

A packed sequence holds several documents; a query attends to the keys from its document's first token up to itself.
`starts` [batch, seq] int64 says for each token where its document begins, as a position in the sequence.

On a CPU each sequence (or document) is cut into tiles of queries. A tile computes scores only with the keys up to the
tile's end; several short documents share one tile. torch's CPU kernel skips masked keys only in blocks of 512, so that
it computes nearly the whole square of a short sequence's scores. One operator with its own backward calls this kernel
for each tile. So activation checkpointing, compilers and counters of FLOPs see one operator of attention, and it saves
the same tensors as torch's. FLOPs are counted for the whole square, as usual.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.flop_counter import register_flop_formula

from titanlab.costs import FLASH3, Capability, kernel_rules, prefers_flash3, with_one_flash

FLASH3_PACKAGE = "flash_attn_interface"
"""The module that the package of FlashAttention 3 installs, which torch imports."""
FLASH3_CURE = "install FlashAttention 3 (its folder `hopper`), or try auto"
_NAME = "FA3"
# Each is None if this torch lacks the function (2.11 may): FlashAttention 3 then cannot be used.
_activate = getattr(attention, "activate_flash_attention_impl", None)
_known = getattr(attention, "list_flash_attention_impls", None)
_current = getattr(attention, "current_flash_attention_impl", None)
_restore = getattr(attention, "restore_flash_attention_impl", None)


def flash3_missing(capability: Capability | None) -> tuple[str, str] | None:
    """Why this process cannot run FlashAttention 3, and the cure; None: it can.

    Args:
        capability: compute capability of the device; None: unknown, then it is not checked.
    """
    if capability is not None and capability[0] != 9:
        named = ".".join(map(str, capability))
        return f"is a kernel of Hopper (compute capability 9.0), and this device has {named}", "try auto"
    if _activate is None or _known is None or _current is None or _restore is None or _NAME not in _known():
        return f"is not a kernel that torch {torch.__version__} can load", "try auto, or torch 2.13 or newer"
    if importlib.util.find_spec(FLASH3_PACKAGE) is None:
        return f"is a kernel of the package {FLASH3_PACKAGE}, which is not installed", FLASH3_CURE
    return None


def choose_flash(kernel: str, capability: Capability) -> bool:
    """Switch torch's flash kernel to the version that a model asks for; return whether that is FlashAttention 3.

    FlashAttention 3 (arXiv 2407.08608) registers its kernels for the operators of torch's flash attention, in the whole
    process. Autograd, compilers, checkpointing and context parallelism still call the same operators.

    Args:
        kernel: `flash3`; `auto`: FlashAttention 3 if it is installed and was measured as the fastest; or the name of
            another kernel.

    Raises:
        ImportError: the package lacks the kernels; `flash3_missing` reports the other reasons.
    """
    uses_flash3 = kernel == FLASH3 or (
        kernel == "auto" and prefers_flash3(capability) and flash3_missing(capability) is None
    )
    active = None if _current is None else _current()
    if uses_flash3 and active != _NAME:
        reason = flash3_missing(capability)
        if reason is not None:
            raise ImportError(f"model.attention={FLASH3} {reason[0]}")
        assert _activate is not None
        try:
            _activate(_NAME)
        except RuntimeError as error:
            raise ImportError(f"model.attention={FLASH3}: {error}") from error
    elif not uses_flash3 and active == _NAME and _restore is not None:
        _restore()
    return uses_flash3


BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    FLASH3: SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
# The kernel of the package `flash-attn`, which is not part of torch.
PACKAGE = "flash_attn"


class InnerAttention(nn.Module):
    """softmax(q·kᵀ/√head_dim)·v, causal, for q [batch, heads, seq, head_dim] and k, v with kv_heads.

    It is a separate module so that context parallelism can replace it. With `documents`, each query attends only to
    keys of its own document.

    Args:
        kernel: `auto`: on a CPU torch's kernel, for short sequences in tiles; on a GPU the fastest kernel that supports
            the inputs. `flash`, `cudnn`, `efficient`, `math`: only this kernel of torch. `flash3`: FlashAttention 3 in
            place of torch's flash kernel. `flash_attn`: the kernel of the package.
    """

    def __init__(self, kernel: str = "auto") -> None:
        super().__init__()
        self.kernel = kernel
        self._backends: Sequence[SDPBackend] = [BACKENDS[kernel]] if kernel in BACKENDS else []
        # Orders of kernels that were measured as fastest for some inputs; `_backends` is for all other inputs.
        self._measured: list[_Measured] = []
        self._package: Callable[..., Any] | None = None

    def prepare(self, device: torch.device) -> None:
        """Choose the kernels for a device; called once, before the first forward.

        Raises:
            ImportError: the package of the kernel is not installed, or the kernel does not fit torch or the device.
        """
        if self.kernel == PACKAGE:
            from flash_attn import flash_attn_func  # type: ignore[import-not-found]

            self._package = flash_attn_func
        elif device.type == "cuda":
            capability = torch.cuda.get_device_capability(device)
            has_flash3 = choose_flash(self.kernel, capability)
            if self.kernel == "auto":
                for rule in kernel_rules(capability):
                    names = (*with_one_flash(rule.order, has_flash3=has_flash3), "math")
                    dtype = None if rule.dtype is None else getattr(torch, rule.dtype)
                    backends = tuple(BACKENDS[name] for name in names)
                    self._measured.append(_Measured(backends, dtype, rule.head_dim, rule.longest))
                # The last rule applies to all other inputs.
                self._backends = self._measured.pop().backends

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents | None = None) -> Tensor:
        if documents is not None:
            return self._within(q, k, v, documents)
        if self._package is not None:
            output: Tensor = self._package(*(x.transpose(1, 2) for x in (q, k, v)), causal=True)
            return output.transpose(1, 2)
        if not self._backends:
            if tiles_are_faster(q, k, v):
                tiled: Tensor = tiled_attention(q, k, v, None, ROWS_OF_TILE)[0]
                return tiled
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self._named(q, k, v, is_causal=True)

    def _within(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
        """Attention within documents: FlexAttention (`auto` on a GPU), tiles (`auto` on a CPU), or a full mask."""
        if isinstance(documents, Tensor):
            if not self._backends:
                output: Tensor = tiled_attention(q, k, v, documents, ROWS_OF_TILE)[0]
                return output
            if self.kernel != "auto":
                return self._named(q, k, v, attn_mask=visible(documents))
            documents = block_mask(documents)
        return flex(q, k, v, documents)

    def _named(self, q: Tensor, k: Tensor, v: Tensor, **mask: Any) -> Tensor:
        backends = self._chosen(q)
        efficient = SDPBackend.EFFICIENT_ATTENTION
        # The efficient kernel runs if the config names it, or for float32, which no other fused kernel supports.
        repeats = backends[0] == efficient or (efficient in backends and q.dtype == torch.float32)
        if repeats and q.shape[1] != k.shape[1]:
            # The efficient kernel alone does not support shared key/value heads (torch's sdp_utils.cpp).
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        with sdpa_kernel(list(backends), set_priority=True):
            output = F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1], **mask)
        if SDPBackend.CUDNN_ATTENTION in backends:
            return _GradientByToken.apply(output)  # type: ignore[no-any-return, no-untyped-call]
        return output

    def _chosen(self, q: Tensor) -> Sequence[SDPBackend]:
        for backends, dtype, head_dim, longest in self._measured:
            if dtype == q.dtype and head_dim == q.shape[3] and (longest is None or q.shape[2] <= longest):
                return backends
        return self._backends

    def extra_repr(self) -> str:
        return self.kernel


class _GradientByToken(torch.autograd.Function):
    """Identity; its backward stores the gradient [batch, heads, seq, head_dim] as [batch, seq, heads, head_dim].

    torch caches cuDNN's backward kernels by shapes and by strides of q, k and v, not by the gradient's layout. A kernel
    that was built for one layout is used for others too, and computes wrong gradients without an error: seen with torch
    2.11 and cuDNN 9.19 on an H200, where a function ran eager and then compiled. In a model, the projection after
    attention already returns its gradient in this layout, so that nothing is copied.
    """

    @staticmethod
    def forward(output: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing for the backward."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return by_token(grad)


def by_token(tensor: Tensor) -> Tensor:
    """A tensor [batch, heads, seq, head_dim] with the same values, stored as [batch, seq, heads, head_dim]."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


class _Measured(NamedTuple):
    """The order in which to try kernels for some inputs. It has plain values, so that torch.compile can trace it."""

    backends: tuple[SDPBackend, ...]
    dtype: torch.dtype | None
    head_dim: int | None
    longest: int | None


_torchs_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_torchs_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class HostStarts:
    """Wraps `starts` [batch, seq] int64, so that it stays on the CPU.

    FSDP2 and DDP copy all tensors among a model's arguments to its device, also those in tuples, lists and
    dictionaries. They pass on other objects, such as this one, unchanged.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@dataclass(frozen=True)
class Packed:
    """The documents of a batch's sequences.

    Attributes:
        positions: position of each token in its document, [batch, seq] int64.
        starts: for each token, where its document begins, as a position in the sequence, [batch, seq] int64.
        stays_on_host: whether `starts` stays on the CPU whatever the model's device; context parallelism needs that.
    """

    positions: Tensor
    starts: Tensor
    stays_on_host: bool = False

    def padded(self, missing: int) -> Packed:
        """A copy with `missing` more sequences as padding, each of one document."""
        positions, starts = (F.pad(part, (0, 0, 0, missing)) for part in (self.positions, self.starts))
        return Packed(positions, starts, self.stays_on_host)

    def arguments(self, rows: slice) -> tuple[Tensor, Tensor | HostStarts]:
        """Positions and starts of some of the sequences: what a model's forward gets after the tokens."""
        starts = self.starts[rows]
        return self.positions[rows], HostStarts(starts) if self.stays_on_host else starts


# FlexAttention computes or skips blocks of this many queries by this many keys; torch's default.
_BLOCK = 128

Documents = Tensor | BlockMask


def prepared(starts: Tensor | HostStarts, kernel: str) -> Documents:
    """The form of `starts` that the named kernel needs; a model calls this once for all its transformer blocks."""
    if isinstance(starts, HostStarts):
        return starts.tensor
    return block_mask(starts) if starts.device.type == "cuda" and kernel == "auto" else starts


def visible(starts: Tensor) -> Tensor:
    """A mask, bool [batch, 1, seq, seq]: whether a query attends to a key."""
    places = torch.arange(starts.shape[1], device=starts.device)
    return ((places <= places[:, None]) & (places >= starts.unsqueeze(-1))).unsqueeze(1)


def block_mask(starts: Tensor) -> BlockMask:
    """FlexAttention's mask: which blocks of keys each block of queries skips, computes whole, or computes with a mask.

    `create_block_mask` would compute this from the whole square of scores. The starts of a query block's first and last
    query are enough, because starts ascend: the block skips keys before its first query's start, and masks keys up to
    its last query's start.
    """
    seq_len = starts.shape[1]
    count = -(-seq_len // _BLOCK)
    blocks = torch.arange(count, device=starts.device)
    last_rows = ((blocks + 1) * _BLOCK).clamp(max=seq_len) - 1
    first = starts[:, blocks * _BLOCK] // _BLOCK
    whole = torch.minimum(-(-starts[:, last_rows] // _BLOCK), blocks)
    if seq_len % _BLOCK:
        # The last query block is not full. It masks all its key blocks: queries past the end see no keys.
        whole[:, -1] = count - 1
    # Masked key blocks: from `first` up to `whole`, and the one on the diagonal.
    masked_count, whole_count = whole - first + 1, blocks - whole
    masked = first.unsqueeze(-1) + blocks
    masked = torch.where(blocks == masked_count.unsqueeze(-1) - 1, blocks.unsqueeze(-1), masked)
    # Entries after the first `masked_count` or `whole_count` are not read, but must be valid indices of blocks.
    masked, others = (x.clamp(max=count - 1) for x in (masked, whole.unsqueeze(-1) + blocks))

    def mask_mod(sequence: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return (key <= row) & (key >= starts[sequence, row])

    # One mask for all heads: [batch, …] → [batch, 1, …].
    masked_count, masked, whole_count, others = (
        numbers.to(torch.int32).unsqueeze(1).contiguous() for numbers in (masked_count, masked, whole_count, others)
    )
    return BlockMask.from_kv_blocks(
        masked_count,
        masked,
        whole_count,
        others,
        BLOCK_SIZE=_BLOCK,
        mask_mod=mask_mod,
        seq_lengths=(seq_len, seq_len),
    )


def flex(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    """FlexAttention (arXiv 2412.05496); compiled on a GPU, because its eager form computes all scores."""
    compute: Any = flex_attention
    if q.device.type == "cuda" and not torch.compiler.is_compiling():
        compute = _compiled_flex()
    output: Tensor = compute(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    return output


@functools.cache
def _compiled_flex() -> Any:
    return torch.compile(flex_attention, dynamic=False)


# The shortest and longest sequence for which tiles are faster than torch's kernel: for heads of width 32, 64 and 128,
# shared or not. benchmarks/attention_tiles.py measured them (benchmarks/results/attention_tiles.json). Tiles compute in
# float32. This helps short bfloat16 sequences: torch's bfloat16 kernel packs all keys again for every few queries.
_LENGTHS = {torch.float32: (128, 1024), torch.bfloat16: (128, 767)}
_WIDEST_HEAD = 128
# Queries of a tile: for documents of any length, 64 was the fastest of 32 to 256 (benchmarks/document_masks.py).
ROWS_OF_TILE = 64


def tiles_are_faster(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether tiles are faster than torch's kernel, for q, k, v [batch, heads, seq, head_dim] without documents."""
    if q.device.type != "cpu" or not (q.dtype == k.dtype == v.dtype and q.shape[2:] == k.shape[2:] == v.shape[2:]):
        return False
    first, last = _LENGTHS.get(q.dtype, (1, 0))
    return first <= q.shape[2] <= last and q.shape[3] <= _WIDEST_HEAD


@torch.library.custom_op("titanlab::tiled_attention", mutates_args=())
def tiled_attention(q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, rows: int) -> tuple[Tensor, Tensor]:
    """Causal softmax(q·kᵀ/√head_dim)·v and the logarithms of its denominators, in float32 (float64 for float64).

    Args:
        q: [batch, heads, seq, head_dim]; k and v have kv_heads, which divide the heads.
        starts: [batch, seq] int64, for each token where its document begins: a query attends to no earlier key.
            None: each sequence is one document.
        rows: the most queries in a tile.

    Returns:
        The output, shaped as q, stored as [batch, seq, heads, head_dim]; the logarithms [batch, heads, seq] float32.
    """
    out, lse = result_like(q), _denominators_of(q)
    q, k, v = map(_wide, (q, k, v))
    triangle = _triangle(q, rows)
    for sequences, begins in _sequences(q, starts):
        for tile in tiles(begins, rows):
            own, keys = tile.slices(sequences)
            mask = _mask_of_tile(triangle, begins, tile)
            out[own], lse[own] = _torchs_forward(q[own], k[keys], v[keys], 0.0, mask is None, attn_mask=mask)
    return out, lse


@torch.library.custom_op("titanlab::tiled_attention_backward", mutates_args=())
def tiled_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor | None,
    out: Tensor,
    lse: Tensor,
    rows: int,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = result_like(q), result_like(k), result_like(v)
    grad, q, k, v, out = map(_wide, (grad, q, k, v, out))
    totals = [result_like(k), result_like(v)] if k.dtype != dk.dtype else [dk, dv]
    triangle = _triangle(q, rows)
    for sequences, begins in _sequences(q, starts):
        # A document's last tile has all the document's keys. It runs first, and sets the gradients to which others add.
        for tile in reversed(list(tiles(begins, rows))):
            own, keys = tile.slices(sequences)
            inputs = (grad[own], q[own], k[keys], v[keys], out[own], lse[own])
            mask = _mask_of_tile(triangle, begins, tile)
            dq[own], *parts = _torchs_backward(*inputs, 0.0, mask is None, attn_mask=mask)
            for total, part in zip(totals, parts, strict=True):
                if tile.last:
                    total[keys] = part
                else:
                    total[keys] += part
    if totals[0] is not dk:
        dk.copy_(totals[0])
        dv.copy_(totals[1])
    return dq, dk, dv


@tiled_attention.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return result_like(q), _denominators_of(q)


@tiled_attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return result_like(q), result_like(k), result_like(v)


# FLOPs as torch counts those of its own kernels: two products of the whole square forward and five backward.
for _operator, _products in (("tiled_attention", 2), ("tiled_attention_backward", 5)):

    @register_flop_formula(getattr(torch.ops.titanlab, _operator))
    def _(shape: tuple[int, ...], *_: Any, products: int = _products, **__: Any) -> int:
        return products * 2 * math.prod(shape) * shape[2]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.rows = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 5
    return *tiled_attention_backward(grad, *ctx.saved_tensors, ctx.rows), None, None


tiled_attention.register_autograd(_differentiate, setup_context=_keep)


class Tile(NamedTuple):
    """One call of torch's kernel: queries from `start` to `end` attend to keys from `first` to `end`.

    shared: the queries are those of several documents, all of which begin in the tile
    last: no later tile has these keys
    """

    first: int
    start: int
    end: int
    shared: bool
    last: bool

    def slices(self, sequences: slice) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """The indices of the tile's queries and of its keys, in tensors [batch, heads, seq, …]."""
        heads = slice(None)
        return (sequences, heads, slice(self.start, self.end)), (sequences, heads, slice(self.first, self.end))


def tiles(starts: list[int], rows: int) -> Iterator[Tile]:
    """Cut one sequence into tiles of up to `rows` queries, in order; `starts`: where each token's document begins.

    A document that is longer than half a tile shares no tile with another document.
    """
    seq_len, begin = len(starts), 0
    group = 0  # the first token of the short documents that wait for a common tile
    while begin < seq_len:
        end = bisect_right(starts, starts[begin], lo=begin)
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


def _sequences(q: Tensor, starts: Tensor | None) -> list[tuple[slice, list[int]]]:
    """Pairs (sequences, where each token's document begins): one per sequence, or one for all if `starts` is None."""
    if starts is None:
        return [(slice(None), [0] * q.shape[2])]
    return [(slice(row, row + 1), begins) for row, begins in enumerate(starts.tolist())]


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def result_like(x: Tensor) -> Tensor:
    """An empty tensor shaped as x, with the strides of torch's results: [batch, seq, heads, head_dim] in memory."""
    return torch.empty_like(x.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)


def _denominators_of(q: Tensor) -> Tensor:
    """An empty tensor for the logarithms of the denominators: float32 [batch, heads, seq]."""
    batch, heads, seq_len, _ = q.shape
    return q.new_empty((batch, seq_len, heads), dtype=torch.float32).transpose(1, 2)


def _triangle(q: Tensor, rows: int) -> Tensor:
    """An additive causal mask [rows, seq + rows]; `_mask_of_tile` takes from it the part for a tile's scores."""
    seq_len = q.shape[2]
    return torch.triu(torch.full((rows, seq_len + rows), -math.inf, dtype=q.dtype, device=q.device), seq_len + 1)


def _mask_of_tile(triangle: Tensor, starts: list[int], tile: Tile) -> Tensor | None:
    """The additive mask [rows, keys] for the scores of a tile; None: the kernel's own causal mask is enough."""
    before = tile.start - tile.first
    if not before and not tile.shared:
        return None
    rows, keys, diagonal = tile.end - tile.start, tile.end - tile.first, triangle.shape[1] - triangle.shape[0]
    mask = triangle[:rows, diagonal - before : diagonal - before + keys]
    if tile.shared:
        places = torch.arange(tile.first, tile.end)
        mask = mask.masked_fill(places < torch.tensor(starts[tile.start : tile.end])[:, None], -math.inf)
    return mask
