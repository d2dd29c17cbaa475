"""Inductor's cache folder, and its repair after a compiling process was killed.

In torch 2.11 to 2.13 the compiler writes objects and libraries under their final names (`CppBuilder.build`): a killed
compiler leaves a part of a file, which later processes load ("file too short"). So damaged files are removed before
torch is imported, and torch makes them again. Delete this when torch writes to another name and renames.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from titanlab.errors import ConfigError

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
# torch keeps precompiled headers in its default folder, wherever the cache is: whoever makes that folder first could
# put code into this user's libraries.
ENVIRONMENT = {"TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}
# torch's names: the suffix of a folder beside a file that is being compiled, and the folder of locks.
_UNDER_WAY = "_CxxBuild"
_LOCKS = "locks"
_WRITTEN_IN_PLACE = (".so", ".o", ".dylib")
# torch renames these files when they are complete; after a power cut they may still be empty.
_RENAMED = (".py", ".cpp", ".h", ".hpp", ".json", ".best_config")


def default_folder(other: Callable[[], Path]) -> Path:
    """A cache folder that no other user can enter: its files are executed, and `repair` deletes in it.

    It is not in the home folder, which hosts may share: the generated code is for this host's processor, and a local
    disk supports locks.

    Args:
        other: gives the folder to use if the first is not this user's alone; may raise ConfigError.
    """
    if _make_private(own_folder()):
        return own_folder() / "inductor"
    with contextlib.suppress(ConfigError):
        if _make_private(folder := other() / "inductor"):
            return folder
    # Not torch's default: anybody can make the folder of that name.
    return Path(tempfile.mkdtemp(prefix="titanlab-compile-"))


def own_folder() -> Path:
    """The folder of this user's caches on this host, which need not exist."""
    return Path(tempfile.gettempdir()) / f"titanlab-{os.getuid()}"


def _make_private(folder: Path) -> bool:
    """Make a folder that only this user can enter; False if it is a link, or if another user could have written there.

    Under a umask of 002 torch makes folders that a group can write to, so that the folder above must keep others out.
    """
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        if _is_ours(folder, closed_to=0o022):
            folder.chmod(0o700)
            return True
    return False


def _is_ours(folder: Path, *, closed_to: int) -> bool:
    """Whether this user owns a folder that is no link and has none of these permissions."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & closed_to


def repair(folder: Path) -> list[Path]:
    """Remove damaged files of a cache folder, if it or the folder above keeps all other users out.

    Files that another process is writing are kept: it holds torch's lock. Processes that start together wait here
    until the first one has finished.

    Returns:
        the removed paths.
    """
    if not _is_ours(folder, closed_to=0) or not any(_is_ours(it, closed_to=0o077) for it in (folder, folder.parent)):
        return []
    with _alone(folder):
        removed = [path for path in _damaged(folder) if _remove(path, folder / _LOCKS)]
        removed += _repair_triton(folder / "triton")
    return removed


def _damaged(folder: Path) -> list[Path]:
    """Incomplete files, and folders of killed compilers, whose files may look complete."""
    damaged = []
    for path in (*folder.glob("*"), *folder.glob("??/*")):
        known = path.suffix in _WRITTEN_IN_PLACE + _RENAMED and path.is_file()
        if path.name.endswith(_UNDER_WAY) or (known and not _is_whole(path)):
            damaged.append(path)
    return damaged


def _is_whole(path: Path) -> bool:
    """Whether a file has the length in its header, which the linker writes last."""
    try:
        size = path.stat().st_size
        if size == 0 or path.suffix not in (".so", ".o") or sys.platform != "linux":
            return size > 0
        with path.open("rb") as file:
            header = file.read(64)
    except FileNotFoundError:
        return True
    # ELF, 64 bits: where the table of sections begins, the size of an entry, their number (elf(5)).
    if len(header) < 64 or header[:5] != b"\x7fELF\x02":
        return False
    order: Literal["little", "big"] = "little" if header[5] == 1 else "big"
    begin, entry, number = (
        int.from_bytes(header[first:last], order) for first, last in ((0x28, 0x30), (0x3A, 0x3C), (0x3C, 0x3E))
    )
    return begin > 0 and begin + entry * number <= size


def _remove(path: Path, locks: Path) -> bool:
    """Remove a damaged file, or all files of a killed compiler; False if another process is writing them."""
    base = path.name.removesuffix(_UNDER_WAY) if path.name.endswith(_UNDER_WAY) else path.stem
    with contextlib.ExitStack() as stack:
        if path.suffix not in _RENAMED and not all(_lock(lock, stack) for lock in _locks_of(base, locks)):
            return False
        # Another process may have compiled it before this one got the lock.
        if not path.exists() or (not path.name.endswith(_UNDER_WAY) and _is_whole(path)):
            return False
        if not path.name.endswith(_UNDER_WAY):
            path.unlink(missing_ok=True)
            return True
        for ending in _WRITTEN_IN_PLACE:
            path.with_name(base + ending).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)
        return True


def _locks_of(base: str, locks: Path) -> list[Path]:
    """The locks under which a compiler writes the file with this name."""
    key, _, part = base.partition(".")
    # A part of a library is compiled under the lock of the library, whose name it does not have.
    return sorted(locks.glob("*.lock")) if part == "optimized" else [locks / f"{key}.lock"]


def _repair_triton(folder: Path) -> list[Path]:
    """Remove kernels with an empty file: Triton renames complete files, so no such file is still being written."""
    damaged = {path.parent for path in folder.glob("*/*/*") if path.is_file() and path.stat().st_size == 0}
    for kernel in damaged:
        shutil.rmtree(kernel, ignore_errors=True)
    return sorted(damaged)


def _lock(path: Path, stack: contextlib.ExitStack) -> bool:
    """Hold one of torch's locks until the stack is left; False if another process does, or if locks do not work."""
    try:
        path.parent.mkdir(exist_ok=True)
        fcntl.flock(stack.enter_context(path.open("a")), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let one process in at a time; several where locks do not work, which is harmless."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            fcntl.flock(stack.enter_context((folder / ".titanlab-repair.lock").open("a")), fcntl.LOCK_EX)
        yield
