"""Folders that runs and caches need: room, speed, locks, and whether other hosts see them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from titanlab.doctor.limits import graded
from titanlab.system import Finding, fail, ok, user_path, warn

_GIB = 1 << 30
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
    """The folder of runs, or where it would be made.

    Args:
        needs_shared: whether jobs run on other hosts.
    """
    folder = existing(runs)
    if not os.access(folder, os.W_OK | os.X_OK):
        yield fail("folder of runs", f"{folder} cannot be written", "give a folder of yours: runs=~/runs")
        return
    yield from _check_room("folder of runs", folder)
    kind, mount = file_system(folder)
    yield _check_kind(kind, mount, needs_shared=needs_shared)
    try:
        yield from _check_writing(folder)
    except OSError as error:
        yield fail("writing", f"{folder}: {error.strerror or error}", "make room, or give another folder: runs=…")


def check_cache(name: str, folder: Path, *, is_executed: bool = False) -> Iterator[Finding]:
    """A folder of a cache, which may not exist yet.

    Args:
        is_executed: whether libraries in it are loaded.
    """
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


def file_system(folder: Path, mounts: Path = Path("/proc/self/mounts")) -> tuple[str, str]:
    """The kind of the file system that has a folder, and where it is mounted; empty if that is not known."""
    best = ("", "")
    try:
        lines = mounts.read_text(errors="replace").splitlines()
    except OSError:
        return best
    real = os.path.realpath(folder)
    for line in lines:
        parts = line.split()
        if len(parts) < 3:
            continue
        # Spaces are written as \040.
        mount = parts[1].encode().decode("unicode_escape", errors="replace")
        if (real == mount or real.startswith(mount.rstrip("/") + "/")) and len(mount) >= len(best[1]):
            best = (parts[2], mount)
    return best


def _check_room(name: str, folder: Path, *, shown: Path | None = None) -> Iterator[Finding]:
    status = os.statvfs(folder)
    free, size = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    text = f"{shown or folder}: {free / _GIB:,.1f} of {size / _GIB:,.1f} GiB free"
    hint = "make room: titanlab clean --dry-run shows what could go"
    yield graded(name, text, hint, fails=free < _NO_BYTES, warns=free < _LOW_BYTES)
    # Some file systems have no fixed number, and say 0.
    if status.f_files and status.f_favail < _LOW_INODES:
        yield warn(f"files, {name}", f"only {status.f_favail:,} more files can be made", "remove small files there")


def _check_kind(kind: str, mount: str, *, needs_shared: bool) -> Finding:
    if kind in _IN_MEMORY:
        return warn("file system", f"{kind} at {mount}: in memory", "runs are lost when the host restarts")
    if kind in _SHARED:
        return ok("file system", f"{kind} at {mount}: other hosts can see it")
    text = f"{kind or 'unknown'} at {mount or '?'}: probably seen by this host only"
    hint = "the nodes of jobs must see the folder of runs: give a shared one (runs=…)"
    return graded("file system", text, hint, warns=needs_shared)


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
            has_locks = True
            try:
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                has_locks = False
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
    speed = _WRITTEN_BYTES / 2**20 / seconds
    hint = "checkpoints take long: checkpoint=async, or a faster folder (runs=…)"
    yield graded("writing", f"{speed:,.0f} MiB/s, with fsync", hint, warns=speed < _SLOW)
    if not has_locks:
        hint = "two processes could work on one run: start each run once, or mount with locks (Lustre: -o flock)"
        yield warn("locks", "this file system has none", hint)
    else:
        yield ok("locks", "flock works")
    if abs(now - written) > _CLOCK_SECONDS:
        text = f"the file server's differs from this host's by {written - now:+,.0f} s"
        yield warn("clock", text, "set both by NTP: ages and orders of files are wrong")
