"""Causal attention of whole sequences, by the kernel that a model asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from titanlab.costs.attention_order import order

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
# The kernel of the package `flash-attn`, which is none of torch's.
PACKAGE = "flash_attn"


class InnerAttention(nn.Module):
    """softmax(q·kᵀ/√head_dim)·v, causal, for q [batch, heads, seq, head_dim] and k, v with kv_heads.

    A module of its own so that context parallelism can take its place.

    Args:
        kernel: `auto`: on a CPU the one that torch chooses; on a GPU the fastest that takes the inputs. `flash`,
            `cudnn`, `efficient`, `math`: this one of torch's and no other. `flash_attn`: that of the package.
    """

    def __init__(self, kernel: str = "auto") -> None:
        super().__init__()
        self.kernel = kernel
        self._backends: Sequence[SDPBackend] = [BACKENDS[kernel]] if kernel in BACKENDS else []
        self._package: Callable[..., Any] | None = None

    def prepare(self, device: torch.device) -> None:
        """Settle what depends on the device; called once, before the first forward.

        Raises:
            ImportError: the kernel is that of a package which is not installed.
        """
        if self.kernel == PACKAGE:
            from flash_attn import flash_attn_func  # type: ignore[import-not-found]

            self._package = flash_attn_func
        elif self.kernel == "auto" and device.type == "cuda":
            names = (*order("auto", torch.cuda.get_device_capability(device)), "math")
            self._backends = [BACKENDS[name] for name in names]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self._package is not None:
            by_place: Tensor = self._package(*(x.transpose(1, 2) for x in (q, k, v)), causal=True)
            return by_place.transpose(1, 2)
        if not self._backends:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        if self._repeats(q) and q.shape[1] != k.shape[1]:
            # The one kernel that takes no shared key/value heads (torch's sdp_utils.cpp).
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        with sdpa_kernel(list(self._backends), set_priority=True):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])

    def _repeats(self, q: Tensor) -> bool:
        """Whether `efficient` is to compute it: asked for, or the only one that is fused and takes 32 bits."""
        fused = SDPBackend.EFFICIENT_ATTENTION
        return self._backends[0] == fused or (fused in self._backends and q.dtype == torch.float32)

    def extra_repr(self) -> str:
        return self.kernel
