"""What this host has, found without importing torch."""

from __future__ import annotations

import itertools
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from titanlab.command import output_of
from titanlab.errors import ConfigError
from titanlab.hardware import find

_DRIVER = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True, kw_only=True)
class Host:
    """Accelerator of this host.

    Attributes:
        accelerator: `cuda` or `cpu`.
        device: the accelerator's name as its driver prints it, or `cpu`.
        count: accelerators visible to this process, or CPU cores.
    """

    accelerator: str
    device: str
    count: int


def this_host() -> Host:
    """The accelerator that a process started here would use; respects CUDA_VISIBLE_DEVICES."""
    names = _visible(_gpu_names(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    if names:
        return Host(accelerator="cuda", device=names[0], count=len(names))
    return Host(accelerator="cpu", device="cpu", count=cores())


def check_host(host: Host, *, accelerator: str, device: str | None, processes: int) -> None:
    """Hold a host to be what a run was named for: numbers of another device would bear the wrong name.

    Args:
        accelerator, device: the cluster's; another name of the same entry in `titanlab.hardware` will do.
        processes: how many start on this host, one a device.

    Raises:
        ConfigError: it is not.
    """
    if accelerator != "cuda":
        return
    if host.accelerator != "cuda":
        raise ConfigError("cluster.accelerator", "cuda", "this host shows no GPU", "try cluster.accelerator=cpu")
    if device not in (None, host.device) and (find(host.device) is None or find(host.device) != find(str(device))):
        rule = f"this host has {host.device}"
        raise ConfigError("cluster.device", device, rule, f"try cluster.device='{host.device}', or null")
    if processes > host.count:
        raise ConfigError("world", processes, f"this host has {host.count} GPUs", f"try world={host.count}")


def cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _visible(names: list[str], wanted: str | None) -> list[str]:
    """The devices that CUDA shows: those before the first that is not there; identifiers are taken in order."""
    if wanted is None:
        return names
    parts = [part.strip() for part in wanted.split(",") if part.strip()]
    places = [int(part) if part.lstrip("-").isdecimal() else place for place, part in enumerate(parts)]
    there = list(itertools.takewhile(lambda place: 0 <= place < len(names), places))
    return [names[place] for place in there]


def _gpu_names() -> list[str]:
    names = []
    for information in sorted(_DRIVER.glob("*/information")):
        for line in information.read_text(errors="replace").splitlines():
            label, _, value = line.partition(":")
            if label.strip() == "Model":
                names.append(value.strip())
    if names or shutil.which("nvidia-smi") is None:
        return names
    # Containers may hide the driver's folder and still bring the tool.
    listed = output_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader", seconds=10.0) or ""
    return [line.strip() for line in listed.splitlines() if line.strip()]
