"""What this process may use of the host: cores, memory, shared memory, open files; its name, clock and network."""

from __future__ import annotations

import os
import re
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from titanlab.distributed import cores, memory_bytes
from titanlab.system import Finding, fail, ok, output_of, warn

_GIB = 1 << 30
_FEW_FILES, _ENOUGH_FILES = 1024, 4096
_LOW_SHARED, _NO_SHARED = 1 * _GIB, 128 << 20
# No clock of a working host is before this version was written.
_EARLIEST = 1_750_000_000
_CGROUPS = Path("/sys/fs/cgroup")
_INFINIBAND = Path("/sys/class/infiniband")
_SECONDS = 10.0


def graded(name: str, text: str, hint: str, *, fails: bool = False, warns: bool = False) -> Finding:
    """A finding of the state that the rules give it; it has the hint if it is not ok."""
    return fail(name, text, hint) if fails else warn(name, text, hint) if warns else ok(name, text)


def check_cores() -> Iterator[Finding]:
    """Cores that this process may use, against those of the host and its cgroup's share."""
    usable, all_cores = cores(), os.cpu_count() or 1
    share = cpu_share()
    text = f"{usable} of the host's {all_cores} may be used"
    if share is not None and share < usable:
        hint = f"the cgroup gives less time than that: set launch.threads, or OMP_NUM_THREADS={max(1, int(share))}"
        yield warn("cores", f"{text}, and the cgroup gives the time of {share:g}", hint)
    elif usable < all_cores:
        yield ok("cores", f"{text} (affinity)")
    else:
        yield ok("cores", text)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        threads = os.environ.get(name, "")
        if threads.isdecimal() and int(threads) > usable:
            yield warn("threads", f"{name}={threads} is more than {usable} cores: runs use fewer", "unset it")
    memory = memory_bytes()
    if memory is None:
        yield warn("memory", "is not known", "this system has no /proc/meminfo")
    else:
        yield ok("memory", f"{memory / _GIB:,.1f} GiB, swap and limits counted in")


def cpu_share(root: Path = _CGROUPS, own: Path = Path("/proc/self/cgroup")) -> float | None:
    """The cores whose time this process's cgroup gives; None: no limit is known."""
    folders = [root]
    try:
        for line in own.read_text(encoding="utf-8", errors="replace").splitlines():
            number, _, path = line.split(":", 2)
            if number == "0":
                folder = root / path.lstrip("/")
                folders += [ancestor for ancestor in (folder, *folder.parents) if ancestor.is_relative_to(root)]
    except (OSError, ValueError):
        pass
    shares = [share for folder in folders for share in _shares(folder)]
    return min(shares, default=None)


def _shares(folder: Path) -> Iterator[float]:
    for quota_file, period_file in (("cpu.max", None), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            words = (folder / quota_file).read_text().split()
            words += (folder / period_file).read_text().split() if period_file else []
            quota, period = float(words[0]), float(words[1])
        except (OSError, ValueError, IndexError):
            continue  # `max`: no limit.
        if quota > 0 and period > 0:
            yield quota / period


def check_shared_memory(folder: Path = Path("/dev/shm")) -> Iterator[Finding]:
    """Shared memory, which NCCL and data readers use between processes of a host."""
    if not folder.is_dir():
        yield warn("shared memory", f"there is no {folder}", "NCCL and data readers then use slower ways")
        return
    status = os.statvfs(folder)
    size, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    text = f"{free / _GIB:,.2f} of {size / _GIB:,.2f} GiB of {folder} free"
    hint = "give the container more: docker run --shm-size=16g, or --ipc=host; remove what ended processes have left"
    yield graded("shared memory", text, hint, fails=free < _NO_SHARED, warns=free < _LOW_SHARED)


def check_ulimits() -> Iterator[Finding]:
    """Limits of this process: open files, locked memory, processes, size of files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{_limit(soft)} (up to {_limit(hard)})"
    hint = "raise it before the start: ulimit -n 65536; on Slurm, see PropagateResourceLimits"
    yield graded("open files", text, hint, fails=0 <= soft < _FEW_FILES, warns=0 <= soft < _ENOUGH_FILES)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / 2**20:,.1f} MiB"
    hint = "InfiniBand pins memory: ulimit -l unlimited, also for slurmd's jobs"
    yield graded("locked memory", text, hint, warns=bool(_infiniband_ports()) and soft != resource.RLIM_INFINITY)
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if soft != resource.RLIM_INFINITY:
        text = f"at most {soft / _GIB:,.1f} GiB"
        yield warn("size of files", text, "a checkpoint may be larger: ulimit -f unlimited")
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        text = f"at most {soft / _GIB:,.1f} GiB of addresses"
        yield warn("address space", text, "CUDA reserves far more than it uses: ulimit -v unlimited")


def _limit(number: int) -> str:
    return "unlimited" if number == resource.RLIM_INFINITY else f"{number:,}"


def check_network() -> Iterator[Finding]:
    """The host's name, the interfaces that variables name, InfiniBand."""
    name = socket.gethostname()
    try:
        addresses = sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None)})
        yield ok("host name", f"{name} is {', '.join(addresses[:4])}")
    except (OSError, UnicodeError) as error:
        hint = "add it to /etc/hosts; runs on one host work without, runs on several need it"
        yield warn("host name", f"{name} cannot be resolved ({error})", hint)
    interfaces = {interface for _, interface in socket.if_nameindex()}
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        value = os.environ.get(variable, "")
        names = [interface for interface in value.lstrip("^=").split(",") if interface]
        exact = variable != "NCCL_SOCKET_IFNAME" or value.startswith("=")
        missing = [
            interface
            for interface in names
            if not value.startswith("^")
            and not (interface in interfaces if exact else any(known.startswith(interface) for known in interfaces))
        ]
        if missing:
            hint = f"ranks cannot meet; the host has {', '.join(sorted(interfaces))}"
            yield fail(variable, f"{value}: there is no interface {', '.join(missing)}", hint)
    ports = _infiniband_ports()
    down = sorted(port for port, state in ports.items() if "ACTIVE" not in state)
    if down:
        hint = "have the links looked at, or leave them out: NCCL_IB_HCA=^" + down[0]
        yield warn("InfiniBand", f"{len(ports) - len(down)} of {len(ports)} ports active; not: {', '.join(down)}", hint)
    elif ports:
        yield ok("InfiniBand", f"{len(ports)} ports active")


def _infiniband_ports() -> dict[str, str]:
    """The state of each port."""
    states = {}
    for path in sorted(_INFINIBAND.glob("*/ports/*/state")):
        try:
            states[f"{path.parts[-4]}:{path.parts[-2]}"] = path.read_text(errors="replace").strip()
        except OSError:
            continue
    return states


def check_clock() -> Iterator[Finding]:
    """The clock, and whether it is kept by NTP."""
    if time.time() < _EARLIEST:
        text = time.strftime("%Y-%m-%d", time.localtime())
        yield fail("clock", f"says {text}", "set it: certificates, tokens and the order of files depend on it")
        return
    output = output_of("timedatectl", "show", "--property=NTPSynchronized", seconds=_SECONDS)
    if output is not None and re.search(r"=no\b", output):
        yield warn("clock", "is not synchronised (timedatectl)", "run an NTP service: hosts' logs are compared by time")
    else:
        yield ok("clock", time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime()))
