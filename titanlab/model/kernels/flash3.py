"""FlashAttention 3 (arXiv 2407.08608) in place of torch's own flash kernel.

`torch.nn.attention.activate_flash_attention_impl("FA3")` registers the package's kernels for the operators of torch's
flash attention, in the whole process: autograd, compilers, checkpointing and context parallelism call the same
operators as before. Its fake results have the same shapes, so that compiled code does not change either.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

from torch.nn import attention

from titanlab.costs.attention_order import FLASH3, Capability, prefers_flash3

PACKAGE = "flash_attn_interface"
"""The module that the package of FlashAttention 3 installs, which torch imports."""
CURE = "install FlashAttention 3 (its folder `hopper`), or try auto"
_NAME = "FA3"
# Young names of torch; where one is missing, so is the kernel.
_activate: Callable[[str], None] | None = getattr(attention, "activate_flash_attention_impl", None)
_known: Callable[[], list[str]] | None = getattr(attention, "list_flash_attention_impls", None)
_current: Callable[[], str | None] | None = getattr(attention, "current_flash_attention_impl", None)
_restore: Callable[..., None] | None = getattr(attention, "restore_flash_attention_impl", None)


def missing(capability: Capability | None) -> tuple[str, str] | None:
    """What this process lacks for FlashAttention 3, and the cure; None: nothing.

    Args:
        capability: of the device; None: not known, and not a reason.
    """
    if capability is not None and capability[0] != 9:
        named = ".".join(map(str, capability))
        return f"is a kernel of Hopper (compute capability 9.0), and this device has {named}", "try auto"
    if None in (_activate, _known, _current, _restore) or (_known is not None and _NAME not in _known()):
        import torch

        return f"is no kernel that torch {torch.__version__} can take in, as 2.13 can", "try auto, or a newer torch"
    if importlib.util.find_spec(PACKAGE) is None:
        return f"is a kernel of the package {PACKAGE}, which is not installed", CURE
    return None


def choose_flash(kernel: str, capability: Capability) -> bool:
    """Make torch's flash kernel the one that a model asks for, and return whether it is FlashAttention 3.

    Args:
        kernel: `flash3`; `auto`, which takes it where it was measured as the fastest and is installed; or another.
        capability: of the device.

    Raises:
        ImportError: the package does not have the kernels; `missing` has the other reasons.
    """
    uses_flash3 = kernel == FLASH3 or (kernel == "auto" and prefers_flash3(capability) and missing(capability) is None)
    active: Any = None if _current is None else _current()
    if uses_flash3 and active != _NAME:
        reason = missing(capability)
        if reason is not None or _activate is None:
            raise ImportError(f"model.attention={FLASH3} {reason[0] if reason else 'is missing'}")
        try:
            _activate(_NAME)
        except RuntimeError as error:
            raise ImportError(f"model.attention={FLASH3}: {error}") from error
    elif not uses_flash3 and active == _NAME and _restore is not None:
        _restore()
    return uses_flash3
