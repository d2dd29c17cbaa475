"""What this host has, found without importing torch."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

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
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in listed.stdout.splitlines() if line.strip()]
