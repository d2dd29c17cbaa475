"""Peak memory of a rank, as metrics."""

from __future__ import annotations

import resource
import sys

import torch

from titanlab.costs import meter


def memory(device: torch.device) -> dict[str, object]:
    """Peak memory so far: of the allocator on a GPU, resident memory of the process on CPU."""
    if device.type != "cuda":
        return {"memory/max_resident(GiB)": peak_memory_gib(device)}
    stats = torch.cuda.memory_stats(device)
    total = torch.cuda.get_device_properties(device).total_memory
    active, reserved = stats["active_bytes.all.peak"], stats["reserved_bytes.all.peak"]
    return {
        meter.MEMORY_ACTIVE: active / 2**30,
        "memory/max_active(%)": 100 * active / total,
        meter.MEMORY_RESERVED: reserved / 2**30,
        "memory/max_reserved(%)": 100 * reserved / total,
        "memory/num_alloc_retries": stats["num_alloc_retries"],
        "memory/num_ooms": stats["num_ooms"],
    }


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory of this rank: reserved by the allocator on a GPU, resident on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / 2**30
    # Linux counts kibibytes, macOS bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
