"""Accelerators, CPU cores and memory of this host, without importing torch."""

from __future__ import annotations

import itertools
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from titanlab.costs import find_device
from titanlab.errors import ConfigError
from titanlab.system import output_of

# Environment variable: the cores that a launcher gives to each process. A process that is bound to some cores does not
# know whether others share them.
CORES = "TITANLAB_CORES"
# torch takes the number of the last one that is set.
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_DRIVER = Path("/proc/driver/nvidia/gpus")
_CGROUP = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, kw_only=True)
class Host:
    """Accelerator of this host.

    Attributes:
        accelerator: `cuda` or `cpu`.
        device: the accelerator's name as its driver prints it, or `cpu`.
        count: accelerators visible to this process, or CPU cores.
        memory_bytes: memory and swap that this process may use (host and cgroup limits); None: unknown.
    """

    accelerator: str
    device: str
    count: int
    memory_bytes: int | None = field(default=None, compare=False)


def this_host() -> Host:
    """The accelerator that a process on this host would use; respects CUDA_VISIBLE_DEVICES."""
    names = _visible(_gpu_names(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    if names:
        return Host(accelerator="cuda", device=names[0], count=len(names), memory_bytes=memory_bytes())
    return Host(accelerator="cpu", device="cpu", count=cores(), memory_bytes=memory_bytes())


def check_host(host: Host, *, accelerator: str, device: str | None, processes: int, has_own_gpu: bool = False) -> None:
    """Check that a host has the device that the recipe names: otherwise results would carry a wrong device name.

    Args:
        accelerator, device: of the recipe's cluster; any name of the same entry in `titanlab.costs.hardware` is valid.
        processes: number of processes on this host, one per device.
        has_own_gpu: see `Ranks`.

    Raises:
        ConfigError: the host has no GPU, another one, or too few.
    """
    if accelerator != "cuda":
        return
    if host.accelerator != "cuda":
        raise ConfigError("cluster.accelerator", "cuda", "this host shows no GPU", "try cluster.accelerator=cpu")
    if device not in (None, host.device) and (
        find_device(host.device) is None or find_device(host.device) != find_device(str(device))
    ):
        rule = f"this host has {host.device}"
        raise ConfigError("cluster.device", device, rule, f"try cluster.device='{host.device}', or null")
    if processes > host.count and not (host.count == 1 and has_own_gpu):
        raise ConfigError("world", processes, f"this host has {host.count} GPUs", f"try world={host.count}")


def gpus() -> int:
    """The GPUs of this host that its driver shows, also if this process may not use them."""
    return len(_gpu_names())


def cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def share_of_cores(processes: int, environ: Mapping[str, str]) -> int:
    """Cores of each of some processes on this host, at least 1: as the launcher says, or an equal share."""
    return int(environ[CORES]) if CORES in environ else max(1, cores() // processes)


def thread_variables(environ: Mapping[str, str], share: int, given: int | None) -> dict[str, str]:
    """Variables that set or replace the number of threads of a process.

    Args:
        environ: a number in here stays if it is not larger than the share; more threads than cores are much slower.
        share: cores of the process.
        given: `launch.threads`, which replaces every other number.
    """
    is_kept = {name: given is None and _threads(environ.get(name, "")) <= share for name in _THREADS}
    return {
        name: str(given or share) for name in _THREADS if not is_kept[name] and (name in environ or name == _THREADS[0])
    }


def thread_count(environ: Mapping[str, str]) -> int:
    """The number of torch's threads in a process whose variables `thread_variables` has completed."""
    return int((environ.get(_THREADS[1]) or environ[_THREADS[0]]).split(",")[0])


def _threads(value: str) -> float:
    # A list has a number for each nested level.
    first = value.split(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) > 0 else math.inf


def memory_bytes() -> int | None:
    """Memory that this process may use, swap included; None where the system does not report it."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
        limits = [sizes["MemTotal"], *_cgroup_limits()]
    except (OSError, ValueError, KeyError, IndexError):
        return None
    return min(limits) + sizes.get("SwapTotal", 0)


def _cgroup_limits() -> Iterator[int]:
    """Memory limits of this process's cgroup and its parents, which Slurm and containers set."""
    try:
        lines = _CGROUP.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            top, name = _CGROUPS, "memory.max"
        elif "memory" in controllers.split(","):
            # cgroup version 1: without a limit the number is larger than any host's memory.
            top, name = _CGROUPS / "memory", "memory.limit_in_bytes"
        else:
            continue
        cgroup = top / path.lstrip("/")
        for folder in (cgroup, *cgroup.parents):
            if folder.is_relative_to(top) and (folder / name).is_file():
                text = (folder / name).read_text(encoding="utf-8").strip()
                if text.isdecimal():
                    yield int(text)


def _visible(names: list[str], visible_devices: str | None) -> list[str]:
    """The devices that CUDA shows: it ignores all after the first invalid index; UUIDs count as 0, 1, … in order."""
    if visible_devices is None:
        return names
    parts = [part.strip() for part in visible_devices.split(",") if part.strip()]
    indices = [int(part) if part.lstrip("-").isdecimal() else index for index, part in enumerate(parts)]
    return [names[index] for index in itertools.takewhile(lambda index: 0 <= index < len(names), indices)]


def _gpu_names() -> list[str]:
    names = []
    for information in sorted(_DRIVER.glob("*/information")):
        for line in information.read_text(errors="replace").splitlines():
            label, _, value = line.partition(":")
            if label.strip() == "Model":
                names.append(value.strip())
    if names or shutil.which("nvidia-smi") is None:
        return names
    # Containers may hide the driver's folder and still contain nvidia-smi.
    listed = output_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader", seconds=10.0) or ""
    return [line.strip() for line in listed.splitlines() if line.strip()]
