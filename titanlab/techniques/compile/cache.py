"""Inductor's cache, and the folder in which the ranks of an attempt on one host compile.

In torch 2.11 to 2.13 the compiler writes files under their final names (`CppBuilder.build`). A killed compiler leaves a
part of a file, which later processes load: so no attempt compiles in the cache. Change this once torch renames files.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from titanlab.errors import ConfigError

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
# No precompiled headers: torch always keeps them in its default folder. Another user who makes that folder first could
# put code into this user's libraries.
ENVIRONMENT = {"TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}
ATTEMPTS = "attempts"
# Not linked: locks belong to one attempt. Triton's records hold absolute paths; inductor's graphs have the kernels too.
_NOT_LINKED = (ATTEMPTS, "locks", "triton")


def default_folder(other: Callable[[], Path]) -> Path:
    """A cache folder that no other user can enter, because processes execute its files.

    It is not in the home folder, which hosts may share: the generated code is for this host's processor, and a local
    disk supports locks.

    Args:
        other: returns the folder to use if another user can enter the first one; may raise ConfigError.
    """
    if _make_private(own_folder()):
        return own_folder() / "inductor"
    with contextlib.suppress(ConfigError):
        if _make_private(folder := other() / "inductor"):
            return folder
    # Not torch's default folder: another user could make a folder of that name first.
    return Path(tempfile.mkdtemp(prefix="titanlab-compile-"))


def own_folder() -> Path:
    """The folder for this user's caches on this host; it may not exist yet."""
    return Path(tempfile.gettempdir()) / f"titanlab-{os.getuid()}"


def _make_private(folder: Path) -> bool:
    """Make a folder that only this user can enter; False if it is a link, or if another user could have written there.

    With a umask of 002 torch makes subfolders that a group can write to, so this folder must keep others out.
    """
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022:
            folder.chmod(0o700)
            return True
    return False


@contextlib.contextmanager
def attempt_folder(cache: Path, name: str) -> Iterator[Path]:
    """Compile in a folder that the ranks of one attempt on this host share; the last rank to leave removes it.

    Args:
        name: the same for these ranks, and for no other attempt that is alive.

    Raises:
        OSError: the file system lacks room, locks or hard links, or does not let this user write.
    """
    attempts = cache / ATTEMPTS
    folder, lock = attempts / name, attempts / f"{name}.lock"
    attempts.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.ExitStack() as held:
        with _alone(attempts):
            for other in attempts.glob("*.lock"):
                _remove_if_unused(other)
            fcntl.flock(held.enter_context(lock.open("a")), fcntl.LOCK_SH | fcntl.LOCK_NB)
            if not folder.exists():
                _link_files(cache, folder)
        before = os.environ.get(VARIABLE)
        os.environ[VARIABLE] = str(folder)
        try:
            yield folder
        finally:
            os.environ.pop(VARIABLE, None)
            if before is not None:
                os.environ[VARIABLE] = before
            # A folder that cannot be removed does not fail the run: the next attempt tries again.
            with contextlib.suppress(OSError), _alone(attempts):
                held.close()
                _remove_if_unused(lock)


def publish(folder: Path) -> None:
    """Add an attempt's new files to the cache. No rank of the attempt may be compiling.

    A file in the cache is always complete, also after a power cut.
    """
    _link_files(folder, folder.parent.parent, sync=True)


def _link_files(source: Path, target: Path, *, sync: bool = False) -> None:
    """Hard-link into `target` the files of `source` and of its subfolders that `target` lacks."""
    target.mkdir(mode=0o700, exist_ok=True)
    with os.scandir(source) as entries:
        for entry in entries:
            there = target / entry.name
            if entry.name in _NOT_LINKED:
                continue
            if entry.is_dir(follow_symlinks=False):
                _link_files(Path(entry.path), there, sync=sync)
            elif entry.is_file(follow_symlinks=False) and not there.exists():
                if sync:
                    with open(entry.path, "rb") as file:
                        os.fsync(file.fileno())
                # Another attempt may be publishing the same file.
                with contextlib.suppress(FileExistsError):
                    os.link(entry.path, there)


def _remove_if_unused(lock: Path) -> None:
    """Remove the folder of an attempt unless one of its ranks is alive. Only one process at a time may call this."""
    with lock.open("a") as file, contextlib.suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
        lock.unlink()


@contextlib.contextmanager
def _alone(attempts: Path) -> Iterator[None]:
    with (attempts / ".begin").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
