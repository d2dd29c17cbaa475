"""Programs that use torch, for `titanlab doctor`: each runs in a process of its own and prints one line of JSON.

    torch_script.py facts
    torch_script.py all_reduce BACKEND RANK WORLD FILE

It imports nothing of titanlab, so that it works with a torch that titanlab cannot use.
"""

from __future__ import annotations

import datetime
import json
import sys
import time
from typing import Any

_SECONDS = 20


def facts() -> dict[str, Any]:
    """What torch knows of itself and of the devices."""
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
        for number in range(torch.cuda.device_count()):
            about = torch.cuda.get_device_properties(number)
            values["devices"].append(
                {
                    "name": about.name,
                    "memory_gib": round(about.total_memory / 2**30, 1),
                    "capability": [about.major, about.minor],
                    "peers": [
                        other
                        for other in range(torch.cuda.device_count())
                        if other != number and torch.cuda.can_device_access_peer(number, other)
                    ],
                }
            )
        values["bf16"] = torch.cuda.is_bf16_supported()
        product = torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")
        values["product"] = float(product.sum().item())
    return values


def all_reduce(backend: str, rank: int, world: int, file: str) -> dict[str, Any]:
    """Add up one tensor over all ranks."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    begin = time.monotonic()
    dist.init_process_group(
        backend,
        store=dist.FileStore(file, world),
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=_SECONDS),
    )
    tensor = torch.full((1 << 18,), float(rank + 1), device=device)
    dist.all_reduce(tensor)
    total = float(tensor[-1].item())
    dist.destroy_process_group()
    return {"total": total, "expected": world * (world + 1) / 2, "seconds": time.monotonic() - begin}


if __name__ == "__main__":
    if sys.argv[1] == "facts":
        sys.stdout.write(json.dumps(facts()) + "\n")
    else:
        result = all_reduce(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
        sys.stdout.write(json.dumps(result) + "\n")
