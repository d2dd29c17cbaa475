"""FSDP2 over symmetric memory: NCCL has other kernels for buffers that are registered with all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from titanlab.errors import ConfigError

KEY = "parallelism.symmetric_memory"
# A young name of torch.
_set: Callable[[Any], None] | None = getattr(FSDPModule, "set_symm_mem_for_comm", None)


def missing() -> tuple[str, str] | None:
    """What the installed torch lacks, and the cure; None: nothing."""
    if _set is None:
        return "needs FSDPModule.set_symm_mem_for_comm, which this torch does not have", "try false, or a newer torch"
    return None


def use_symmetric_memory(units: Sequence[FSDPModule], groups: Sequence[dist.ProcessGroup]) -> None:
    """Let every unit of FSDP2 gather into, and scatter from, buffers in symmetric memory.

    Args:
        groups: whose collectives these are.

    Raises:
        ConfigError: torch or the backend of a group does not support it.
    """
    reason = missing()
    if reason is not None:
        raise ConfigError(KEY, True, *reason)
    backends = {str(dist.get_backend(group)) for group in groups}
    if backends != {dist.Backend.NCCL}:
        others = ", ".join(sorted(backends - {dist.Backend.NCCL}))
        raise ConfigError(KEY, True, f"is memory of NCCL, and a group of FSDP2 uses {others}", "try false")
    assert _set is not None
    for unit in units:
        # Before the other call: NCCL's reduce-scatter in symmetric memory only sums, so FSDP2 divides afterwards.
        unit.set_force_sum_reduction_for_comms(True)
        _set(unit)
