"""Causal attention of full sequences, with the kernel that a model's config names."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from titanlab.costs import FLASH3, Capability, kernel_rules, prefers_flash3, with_one_flash
from titanlab.techniques.model.documents import (
    Documents,
    block_mask,
    document_tiling,
    flex,
    tiled_attention,
    tiling,
    visible,
)

FLASH3_PACKAGE = "flash_attn_interface"
"""The module that the package of FlashAttention 3 installs, which torch imports."""
FLASH3_CURE = "install FlashAttention 3 (its folder `hopper`), or try auto"
_NAME = "FA3"
# Names that torch added recently; torch without one of them lacks the kernel.
_activate: Callable[[str], None] | None = getattr(attention, "activate_flash_attention_impl", None)
_known: Callable[[], list[str]] | None = getattr(attention, "list_flash_attention_impls", None)
_current: Callable[[], str | None] | None = getattr(attention, "current_flash_attention_impl", None)
_restore: Callable[..., None] | None = getattr(attention, "restore_flash_attention_impl", None)


def flash3_missing(capability: Capability | None) -> tuple[str, str] | None:
    """What this process lacks for FlashAttention 3, and the cure; None: it has all.

    Args:
        capability: compute capability of the device; None: unknown, and not checked.
    """
    if capability is not None and capability[0] != 9:
        named = ".".join(map(str, capability))
        return f"is a kernel of Hopper (compute capability 9.0), and this device has {named}", "try auto"
    if None in (_activate, _known, _current, _restore) or (_known is not None and _NAME not in _known()):
        return f"is no kernel that torch {torch.__version__} can take in, as 2.13 can", "try auto, or a newer torch"
    if importlib.util.find_spec(FLASH3_PACKAGE) is None:
        return f"is a kernel of the package {FLASH3_PACKAGE}, which is not installed", FLASH3_CURE
    return None


def choose_flash(kernel: str, capability: Capability) -> bool:
    """Make torch's flash kernel the one that a model asks for, and return whether it is FlashAttention 3.

    FlashAttention 3 (arXiv 2407.08608) registers its kernels for the operators of torch's flash attention, in the whole
    process: autograd, compilers, checkpointing and context parallelism call the same operators as before.

    Args:
        kernel: `flash3`; `auto`: FlashAttention 3 if it is installed and was measured as the fastest; or the name of
            another kernel.

    Raises:
        ImportError: the package lacks the kernels; `flash3_missing` reports the other reasons.
    """
    uses_flash3 = kernel == FLASH3 or (
        kernel == "auto" and prefers_flash3(capability) and flash3_missing(capability) is None
    )
    active: Any = None if _current is None else _current()
    if uses_flash3 and active != _NAME:
        reason = flash3_missing(capability)
        if reason is not None or _activate is None:
            raise ImportError(f"model.attention={FLASH3} {reason[0] if reason else 'is missing'}")
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

    It is a separate module so that context parallelism can replace it. With `documents`, rows attend only to their own
    document; see `titanlab.techniques.model.documents`.

    Args:
        kernel: `auto`: on a CPU torch's kernel, for short sequences in tiles; on a GPU the fastest kernel that supports
            the inputs. `flash`, `cudnn`, `efficient`, `math`: only this kernel of torch. `flash3`: FlashAttention 3 in
            place of torch's flash kernel. `flash_attn`: the kernel of the package.
    """

    def __init__(self, kernel: str = "auto") -> None:
        super().__init__()
        self.kernel = kernel
        self._backends: Sequence[SDPBackend] = [BACKENDS[kernel]] if kernel in BACKENDS else []
        # Inputs for which another order of kernels was measured as faster.
        self._measured: Sequence[_Measured] = ()
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
                measured = []
                for rule in kernel_rules(capability):
                    names = (*with_one_flash(rule.order, has_flash3=has_flash3), "math")
                    # The last rule applies to all other inputs.
                    self._backends = tuple(BACKENDS[name] for name in names)
                    dtype = None if rule.dtype is None else getattr(torch, rule.dtype)
                    measured.append(_Measured(self._backends, dtype, rule.head_dim, rule.longest))
                self._measured = measured[:-1]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents | None = None) -> Tensor:
        if documents is not None:
            return self._within(q, k, v, documents)
        if self._package is not None:
            output: Tensor = self._package(*(x.transpose(1, 2) for x in (q, k, v)), causal=True)
            return output.transpose(1, 2)
        if not self._backends:
            chosen = tiling(q, k, v)
            if chosen is not None:
                tiled: Tensor = tiled_attention(q, k, v, None, *chosen)[0]
                return tiled
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self._named(q, k, v, is_causal=True)

    def _within(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
        """Attention within documents: FlexAttention on a GPU, tiles on a CPU, else a mask of the whole square."""
        if isinstance(documents, Tensor):
            if not self._backends:
                output: Tensor = tiled_attention(q, k, v, documents, *document_tiling(q))[0]
                return output
            if self.kernel != "auto":
                return self._named(q, k, v, attn_mask=visible(documents))
            documents = block_mask(documents)
        return flex(q, k, v, documents)

    def _named(self, q: Tensor, k: Tensor, v: Tensor, **mask: Any) -> Tensor:
        backends = self._chosen(q)
        efficient = SDPBackend.EFFICIENT_ATTENTION
        # The efficient kernel runs if the config names it, or if no other fused kernel supports float32.
        repeats = backends[0] == efficient or (efficient in backends and q.dtype == torch.float32)
        if repeats and q.shape[1] != k.shape[1]:
            # Only this kernel does not support shared key/value heads (torch's sdp_utils.cpp).
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
    """The same values, whose gradient [batch, heads, seq, head_dim] lies in memory as [batch, seq, heads, head_dim].

    torch keeps the backward kernels of cuDNN by shapes and by strides of q, k and v. Kernels that were made for a
    gradient of one layout are used for other layouts too, and compute wrong gradients without an error: seen with torch
    2.11 and cuDNN 9.19 on an H200, where a function ran eager and then compiled. The gradient of a model's attention
    comes in this layout from the projection behind it, so that nothing is copied.
    """

    @staticmethod
    def forward(output: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return by_token(grad)


def by_token(tensor: Tensor) -> Tensor:
    """The values of [batch, heads, seq, head_dim], which lie in memory as [batch, seq, heads, head_dim]."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


class _Measured(NamedTuple):
    """Kernels in the order in which to try them, for some inputs: plain values, through which a compiler can trace."""

    backends: tuple[SDPBackend, ...]
    dtype: torch.dtype | None
    head_dim: int | None
    longest: int | None
