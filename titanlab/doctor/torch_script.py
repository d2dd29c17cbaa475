"""Programs that use torch, for `titanlab doctor`: each runs in a separate process and prints one line of JSON.

    torch_script.py facts
    torch_script.py all_reduce BACKEND WORLD

This file imports nothing of titanlab, so that it works with a torch that titanlab cannot use.
"""

from __future__ import annotations

import datetime
import json
import signal
import sys
import tempfile
import time
from typing import Any

_SECONDS = 20


def facts() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    values: dict[str, Any] = {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cuda_available": torch.cuda.is_available(),
        "distributed": dist.is_available(),
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "nccl": dist.is_available() and dist.is_nccl_available(),
        "threads": torch.get_num_threads(),
        "cpu_bf16": torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        "devices": [],
        "architectures": torch.cuda.get_arch_list() if torch.version.cuda else [],
    }
    if values["cuda_available"]:
        if values["nccl"]:
            values["nccl_version"] = ".".join(map(str, torch.cuda.nccl.version()))
        numbers = range(torch.cuda.device_count())
        for number in numbers:
            about, others = torch.cuda.get_device_properties(number), [other for other in numbers if other != number]
            device = {"name": about.name, "memory_gib": round(about.total_memory / 2**30, 1)}
            device["capability"] = [about.major, about.minor]
            device["peers"] = [other for other in others if torch.cuda.can_device_access_peer(number, other)]
            values["devices"].append(device)
        product = torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")
        values["product"] = float(product.sum().item())
    return values


def all_reduce(backend: str, world: int) -> dict[str, Any]:
    """Add up one tensor over `world` processes; returns each process's sum."""
    from torch import multiprocessing

    begin = time.monotonic()
    # Forked, so that torch is imported once.
    totals = multiprocessing.get_context("fork").Array("d", world)
    with tempfile.TemporaryDirectory(prefix="titanlab-doctor-", ignore_cleanup_errors=True) as folder:
        inputs = (backend, world, f"{folder}/store", totals)
        multiprocessing.start_processes(add_up, inputs, world, start_method="fork")
    return {"totals": totals[:], "seconds": time.monotonic() - begin}


def add_up(rank: int, backend: str, world: int, store: str, totals: Any) -> None:
    """The code of one process. When the parent process ends, torch ends this process by SIGINT."""
    import torch
    import torch.distributed as dist

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    limit, meeting = datetime.timedelta(seconds=_SECONDS), dist.FileStore(store, world)
    dist.init_process_group(backend, store=meeting, rank=rank, world_size=world, timeout=limit)
    tensor = torch.full((1 << 18,), float(rank + 1), device=device)
    dist.all_reduce(tensor)
    totals[rank] = float(tensor[-1].item())
    dist.destroy_process_group()


if __name__ == "__main__":
    result = facts() if sys.argv[1] == "facts" else all_reduce(sys.argv[2], int(sys.argv[3]))
    sys.stdout.write(json.dumps(result) + "\n")
