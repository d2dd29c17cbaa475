"""The memory that a rank's parameters, gradients and optimizer state hold, and the peak of its memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from titanlab.dtensor import local_part
from titanlab.techniques.profiler.profilers_schema import ITEM_RANK, ITEMS, REST, item_metric


def held(*, on_gpu: bool) -> dict[str, float]:
    """GiB that this rank holds on its device, by item; `rest`: its peak of memory so far minus all items."""
    sizes = consumers("cuda" if on_gpu else "cpu")
    peak = torch.cuda.max_memory_reserved() if on_gpu else peak_resident_bytes()
    sizes[REST] = max(0, peak - sum(sizes.values()))
    return {item: size / 2**30 for item, size in sizes.items()}


def fullest(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Metrics: the GiB by item of the rank that needs most memory, and the number of that rank."""
    rank = max(range(len(rows)), key=lambda number: sum(rows[number].values()))
    return {**{item_metric(item): size for item, size in rows[rank].items()}, ITEM_RANK: rank}


def held_line(row: Mapping[str, float]) -> str:
    """One line for the log with the items of a row of `fullest`."""
    sizes = (f"{item} {row[item_metric(item)]:.3g} GiB" for item in (*ITEMS, REST))
    return f"memory by item, most on rank {int(row[ITEM_RANK])}: {', '.join(sizes)}"


def resident_bytes() -> int:
    """Resident memory of this process."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def peak_resident_bytes() -> int:
    """Largest resident memory of this process so far, in bytes. Linux counts kibibytes, macOS bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def forget_peak() -> None:
    """Give unused memory back, and reset the peak of resident memory to its present size. Needs Linux with glibc."""
    # AttributeError: a C library other than glibc lacks malloc_trim.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def consumers(device: str | None = None) -> dict[str, int]:
    """Bytes of this process's parameters, gradients and optimizer state, by item; a shared storage counts once.

    Args:
        device: count only what is on devices of this type.
    """
    # Not isinstance: it reads `__class__` of lazy proxies, which may import their libraries.
    tensors = [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor)]
    optimizers = [value for value in gc.get_objects() if issubclass(type(value), torch.optim.Optimizer)]
    # isinstance is right here: a parameter that is a DTensor has the type DTensor.
    parameters = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]
    states = [value for optimizer in optimizers for state in optimizer.state.values() for value in state.values()]
    gradients = [parameter.grad for parameter in parameters]
    kinds: dict[str, list[Any]] = dict(zip(ITEMS, (parameters, gradients, states), strict=True))
    sizes, seen = dict.fromkeys(kinds, 0), set[int]()
    for name, values in kinds.items():
        for value in values:
            # Some kinds of tensors have no storage.
            with contextlib.suppress(RuntimeError, NotImplementedError):
                local = local_part(value)
                # The compiler keeps fake tensors, which name a device and hold nothing there.
                if not isinstance(local, torch.Tensor) or isinstance(local, FakeTensor) or local.device.type == "meta":
                    continue
                if device is not None and local.device.type != device:
                    continue
                storage = local.untyped_storage()
                if storage.data_ptr() not in seen:
                    seen.add(storage.data_ptr())
                    sizes[name] += storage.nbytes()
    return sizes
