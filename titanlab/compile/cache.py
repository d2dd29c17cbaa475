"""The folder in which inductor keeps what it has compiled, and its repair after a process was killed in the middle.

torch has a compiler write objects and libraries under their final names (`CppBuilder.build`, torch 2.11 to 2.13): one
that is killed leaves half a file, which every later process takes for whole ("file too short"). Until torch writes them
beside and renames them, what is damaged is removed before torch is imported; torch then makes it again.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
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
# Of torch: the folder beside a file while a compiler writes it, and that of the locks under which it does so.
_UNDER_WAY = "_CxxBuild"
_LOCKS = "locks"
_WRITTEN_IN_PLACE = (".so", ".o", ".gch", ".dylib")
# These are renamed when they are whole; after a power cut they may be empty nevertheless.
_RENAMED = (".py", ".cpp", ".h", ".hpp", ".json", ".best_config")


def default_folder(other: Callable[[], Path]) -> Path | None:
    """A folder of this user on this host, where no other program's compilations are; None: there is none.

    Not in a home folder, which many hosts may share: as with torch's own, code is generated for the host's processor,
    and a disk of the host has locks.

    Args:
        other: gives the folder to use where somebody else could write to that one; may raise ConfigError.
    """
    folder = Path(tempfile.gettempdir()) / f"titanlab-{os.getuid()}"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        # What is in it is executed: nobody else may have put it there.
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022:
            return folder / "inductor"
    with contextlib.suppress(ConfigError):
        return other() / "inductor"
    return None


def repair(folder: Path) -> list[Path]:
    """Remove what is damaged in a cache folder, and in torch's folder of precompiled headers.

    What another process is writing is left alone: it holds torch's lock. Processes that start together wait for each
    other here, so that none goes on before the first has finished.

    Returns:
        what has been removed.
    """
    if not folder.is_dir():
        return []
    # torch keeps these in its default folder, wherever the rest is.
    headers = _torch_default() / "precompiled_headers"
    with _alone(folder):
        removed = [path for each in (folder, headers) for path in _damaged(each) if _remove(path, each / _LOCKS)]
        removed += _repair_triton(folder / "triton")
    return removed


def _damaged(folder: Path) -> list[Path]:
    """Files, and the folders of compilers that were killed, of which the files may look whole."""
    found = []
    for path in (*folder.glob("*"), *folder.glob("??/*")):
        known = path.suffix in _WRITTEN_IN_PLACE + _RENAMED and path.is_file()
        if path.name.endswith(_UNDER_WAY) or (known and not _is_whole(path)):
            found.append(path)
    return found


def _is_whole(path: Path) -> bool:
    """Whether a file has all that its header, which a linker writes last, says that it has."""
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
    """Remove a damaged file, or all that a killed compiler was to write; False where another process works on it."""
    base = path.name.removesuffix(_UNDER_WAY) if path.name.endswith(_UNDER_WAY) else path.stem
    with contextlib.ExitStack() as stack:
        if path.suffix not in _RENAMED and not all(_lock(lock, stack) for lock in _locks_of(base, locks)):
            return False
        # Looked at again: whoever had the lock may have made it.
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
    """The locks under which a compiler writes what is called so."""
    key, _, part = base.partition(".")
    # A part of a library is compiled under the lock of the library, which its name does not tell.
    return sorted(locks.glob("*.lock")) if part == "optimized" else [locks / f"{key}.lock"]


def _repair_triton(folder: Path) -> list[Path]:
    """Remove kernels of which a file is empty: Triton renames what is whole, so that none is being written."""
    damaged = {path.parent for path in folder.glob("*/*/*") if path.is_file() and path.stat().st_size == 0}
    for kernel in damaged:
        shutil.rmtree(kernel, ignore_errors=True)
    return sorted(damaged)


def _lock(path: Path, stack: contextlib.ExitStack) -> bool:
    """Hold one of torch's locks until the stack is left; False where another process does, or locks do not work."""
    try:
        path.parent.mkdir(exist_ok=True)
        fcntl.flock(stack.enter_context(path.open("a")), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time; where locks do not work, several, which does no harm."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            fcntl.flock(stack.enter_context((folder / ".titanlab-repair.lock").open("a")), fcntl.LOCK_EX)
        yield


def _torch_default() -> Path:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid_{os.getuid()}"
    return Path(tempfile.gettempdir()) / f"torchinductor_{user}"
