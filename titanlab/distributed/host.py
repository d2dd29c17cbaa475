"""Accelerators, CPU cores and memory of this host, without importing torch."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from titanlab.costs import find_device
from titanlab.distributed.ranks import CORES
from titanlab.errors import ConfigError
from titanlab.system import output_of

# If both are set, torch uses the last one.
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_DRIVER = Path("/proc/driver/nvidia/gpus")
_ROOT = Path("/")


@dataclass(frozen=True, kw_only=True)
class Host:
    """The accelerators of this host, or its CPU cores if it has none."""

    accelerator: str
    device: str  # the accelerator's name as its driver prints it, or `cpu`
    count: int
    # memory and swap that this process may use, by the limits of host and cgroup; None: unknown.
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
        accelerator, device: the recipe's; any name of the same device in `titanlab.costs.hardware` is valid.
        processes: number of processes on this host, one per device.

    Raises:
        ConfigError: the host has no GPU, another kind of GPU, or too few GPUs.
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
    """The number of GPUs that this host's driver shows, even if this process may not use them."""
    return len(_gpu_names())


def cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def share_of_cores(processes: int, environ: Mapping[str, str]) -> int:
    """Cores for each of several processes on this host, at least 1: as the launcher says, or an equal share."""
    return int(environ[CORES]) if CORES in environ else max(1, cores() // processes)


def thread_variables(environ: Mapping[str, str], share: int, given: int | None) -> dict[str, str]:
    """Variables that set or replace the number of threads of a process.

    Args:
        environ: if it has a number of threads, that number stays unless it exceeds the share: more would be slower.
        given: `launch.threads`, which replaces every other number.
    """
    variables = {}
    for name in _THREADS:
        # The value may be a list, with a number for each level of nesting: take the first.
        first = environ.get(name, "").split(",")[0].strip()
        is_kept = given is None and first.isdecimal() and 0 < int(first) <= share
        if not is_kept and (name in environ or name == _THREADS[0]):
            variables[name] = str(given or share)
    return variables


def thread_count(environ: Mapping[str, str]) -> int:
    """The number of torch's threads in a process whose variables `thread_variables` has completed."""
    return int((environ.get(_THREADS[1]) or environ[_THREADS[0]]).split(",")[0])


def memory_bytes(root: Path = _ROOT) -> int | None:
    """Memory that this process may use, including swap; None if the system does not report it."""
    try:
        lines = (root / "proc/meminfo").read_text(encoding="utf-8").splitlines()
        sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
        limits = [sizes["MemTotal"]]
        for folder in memory_groups(root):
            # cgroup version 2, then 1. Without a limit, version 1 has a number larger than any host's memory.
            for file in (folder / "memory.max", folder / "memory.limit_in_bytes"):
                text = file.read_text(encoding="utf-8").strip() if file.is_file() else ""
                limits += [int(text)] if text.isdecimal() else []
    except (OSError, ValueError, KeyError, IndexError):
        return None
    return min(limits) + sizes.get("SwapTotal", 0)


def memory_groups(root: Path = _ROOT) -> Iterator[Path]:
    """The folders of this process's control group for memory and of its parents, up to the mount.

    Slurm and containers set limits in such groups. In a container the mount may begin at the group itself.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" or "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup" if number == "0" else root / "sys/fs/cgroup/memory"
            group = mount / path.lstrip("/")
            yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(mount))


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
