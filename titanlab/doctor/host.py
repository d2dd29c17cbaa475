"""Checks of the host: its cores, memory, limits of this process, the host's name, and folders."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from titanlab.distributed import cores, memory_bytes
from titanlab.system import Finding, fail, ok, user_path, warn

_GIB = 1 << 30
_FEW_FILES, _ENOUGH_FILES = 1024, 4096
_LOW_SHARED, _NO_SHARED = 1 * _GIB, 128 << 20


def graded(name: str, text: str, hint: str, *, fails: bool = False, warns: bool = False) -> Finding:
    """A finding that fails if `fails`, else warns if `warns`, else is ok and has no hint."""
    return fail(name, text, hint) if fails else warn(name, text, hint) if warns else ok(name, text)


def check_cores() -> Iterator[Finding]:
    """Findings about the cores that this process may use, compared with the host's, and about memory."""
    usable, all_cores = cores(), os.cpu_count() or 1
    text = f"{usable} of the host's {all_cores} may be used"
    yield ok("cores", f"{text} (affinity)" if usable < all_cores else text)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        threads = os.environ.get(name, "")
        if threads.isdecimal() and int(threads) > usable:
            yield warn("threads", f"{name}={threads} is more than {usable} cores: runs use fewer", "unset it")
    memory = memory_bytes()
    if memory is None:
        yield warn("memory", "is not known", "this system has no /proc/meminfo")
    else:
        yield ok("memory", f"{memory / _GIB:,.1f} GiB, swap and limits counted in")


def check_shared_memory(folder: Path = Path("/dev/shm")) -> Iterator[Finding]:
    """Findings about shared memory, which NCCL and data readers use between processes of a host."""
    if not folder.is_dir():
        yield warn("shared memory", f"there is no {folder}", "NCCL and data readers then use slower methods")
        return
    status = os.statvfs(folder)
    size, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    text = f"{free / _GIB:,.2f} of {size / _GIB:,.2f} GiB of {folder} free"
    hint = "give the container more: docker run --shm-size=16g, or --ipc=host; remove what ended processes have left"
    yield graded("shared memory", text, hint, fails=free < _NO_SHARED, warns=free < _LOW_SHARED)


def check_ulimits() -> Iterator[Finding]:
    """Findings about the limits of this process: open files, locked memory, size of files, address space."""
    unlimited = resource.RLIM_INFINITY
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    numbers = ["unlimited" if number == unlimited else f"{number:,}" for number in (soft, hard)]
    hint = "raise it before the start: ulimit -n 65536; on Slurm, see PropagateResourceLimits"
    text = f"{numbers[0]} (up to {numbers[1]})"
    yield graded("open files", text, hint, fails=0 <= soft < _FEW_FILES, warns=0 <= soft < _ENOUGH_FILES)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = "unlimited" if soft == unlimited else f"{soft / 2**20:,.1f} MiB; InfiniBand needs ulimit -l unlimited"
    yield ok("locked memory", text)
    for name, which, of, hint in (
        ("size of files", resource.RLIMIT_FSIZE, "", "a checkpoint may be larger: ulimit -f unlimited"),
        ("address space", resource.RLIMIT_AS, " of addresses", "CUDA reserves far more: ulimit -v unlimited"),
    ):
        soft, _ = resource.getrlimit(which)
        if soft != unlimited:
            yield warn(name, f"at most {soft / _GIB:,.1f} GiB{of}", hint)


def check_network() -> Iterator[Finding]:
    """Findings about the host's name, under which ranks of other hosts find the host."""
    name = socket.gethostname()
    try:
        addresses = sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None)})
        yield ok("host name", f"{name} is {', '.join(addresses[:4])}")
    except (OSError, UnicodeError) as error:
        hint = "add it to /etc/hosts; runs on one host work without, runs on several need it"
        yield warn("host name", f"{name} cannot be resolved ({error})", hint)


_LOW_BYTES, _NO_BYTES = 20 * _GIB, 1 * _GIB
_LOW_INODES = 10_000
_WRITTEN_BYTES = 64 << 20
_PIECE_BYTES = 4 << 20
_SLOW = 100.0  # MiB/s
_CLOCK_SECONDS = 5.0
_SHARED = {
    *("nfs", "nfs4", "lustre", "gpfs", "beegfs", "beegfs_nodev", "ceph", "cephfs", "glusterfs", "fuse.glusterfs"),
    *("wekafs", "panfs", "orangefs", "pvfs2", "afs", "cifs", "smb3", "9p", "virtiofs", "fuse.sshfs", "fuse.juicefs"),
}
_IN_MEMORY = {"tmpfs", "ramfs"}


def check_runs(runs: Path, *, needs_shared: bool) -> Iterator[Finding]:
    """Findings about the folder of runs, or its nearest existing parent; `needs_shared`: jobs run on other hosts."""
    folder = existing(runs)
    if not os.access(folder, os.W_OK | os.X_OK):
        yield fail("folder of runs", f"{folder} cannot be written", "give a folder of yours: runs=~/runs")
        return
    yield from _check_room("folder of runs", folder)
    kind, mount = file_system(folder)
    if kind in _IN_MEMORY:
        yield warn("file system", f"{kind} at {mount}: in memory", "runs are lost when the host restarts")
    elif kind in _SHARED:
        yield ok("file system", f"{kind} at {mount}: other hosts can see it")
    else:
        text = f"{kind or 'unknown'} at {mount or '?'}: probably seen by this host only"
        hint = "the nodes of jobs must see the folder of runs: give a shared one (runs=…)"
        yield graded("file system", text, hint, warns=needs_shared)
    try:
        yield from _check_writing(folder)
    except OSError as error:
        yield fail("writing", f"{folder}: {error.strerror or error}", "make room, or give another folder: runs=…")


def check_cache(name: str, folder: Path, *, is_executed: bool = False) -> Iterator[Finding]:
    """Findings about a cache's folder, which may not exist yet; `is_executed`: processes load libraries from it."""
    there = existing(folder)
    if not os.access(there, os.W_OK | os.X_OK):
        yield fail(name, f"{there} cannot be written", "give another folder (TITANLAB_CACHE, TMPDIR)")
        return
    if is_executed and os.statvfs(there).f_flag & os.ST_NOEXEC:
        yield fail(name, f"{there} is mounted noexec: compiled code cannot be loaded", "set TORCHINDUCTOR_CACHE_DIR")
        return
    yield from _check_room(name, there, shown=folder)


def existing(folder: Path) -> Path:
    """The folder, or the nearest folder above it that exists."""
    absolute = Path(os.path.abspath(user_path(folder)))
    return next(path for path in (absolute, *absolute.parents) if path.is_dir())


def file_system(folder: Path) -> tuple[str, str]:
    """The kind and the mount point of a folder's file system; empty if they are not known."""
    best, real = ("", ""), os.path.realpath(folder)
    with contextlib.suppress(OSError):
        for each in psutil.disk_partitions(all=True):
            is_above = real == each.mountpoint or real.startswith(each.mountpoint.rstrip("/") + "/")
            # If two file systems have the same mount point, the later one hides the earlier one.
            if is_above and len(each.mountpoint) >= len(best[1]):
                best = (each.fstype, each.mountpoint)
    return best


def _check_room(name: str, folder: Path, *, shown: Path | None = None) -> Iterator[Finding]:
    status = os.statvfs(folder)
    free, size = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    text = f"{shown or folder}: {free / _GIB:,.1f} of {size / _GIB:,.1f} GiB free"
    hint = "make room: titanlab clean --dry-run shows what could go"
    yield graded(name, text, hint, fails=free < _NO_BYTES, warns=free < _LOW_BYTES)
    # Some file systems have no fixed number of inodes, and report 0.
    if status.f_files and status.f_favail < _LOW_INODES:
        yield warn(f"files, {name}", f"only {status.f_favail:,} more files can be made", "remove small files there")


def _check_writing(folder: Path) -> Iterator[Finding]:
    path = folder / f".titanlab-doctor.{os.getpid()}-{secrets.token_hex(4)}.tmp"
    piece = os.urandom(_PIECE_BYTES)
    try:
        with path.open("xb", buffering=0) as file:
            begin = time.monotonic()
            for _ in range(_WRITTEN_BYTES // _PIECE_BYTES):
                file.write(piece)
            os.fsync(file.fileno())
            seconds = max(time.monotonic() - begin, 1e-6)
            now, written = time.time(), os.fstat(file.fileno()).st_mtime
            has_locks = False
            with contextlib.suppress(OSError):
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                has_locks = True
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
    speed = _WRITTEN_BYTES / 2**20 / seconds
    hint = "checkpoints take long: checkpoint=async, or a faster folder (runs=…)"
    yield graded("writing", f"{speed:,.0f} MiB/s, with fsync", hint, warns=speed < _SLOW)
    text = "flock works" if has_locks else "this file system has none"
    hint = "two processes could work on one run: start each run once, or mount with locks (Lustre: -o flock)"
    yield graded("locks", text, hint, warns=not has_locks)
    if abs(now - written) > _CLOCK_SECONDS:
        text = f"the file server's differs from this host's by {written - now:+,.0f} s"
        yield warn("clock", text, "set both by NTP: ages and orders of files are wrong")
