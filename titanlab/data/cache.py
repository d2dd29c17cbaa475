"""The cache folder of prepared data, which several processes can fill together."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from titanlab.data.streams.stream import Report
from titanlab.errors import ConfigError
from titanlab.records.claim import holder, name_holder
from titanlab.system.files import home, user_path

VARIABLE = "TITANLAB_CACHE"
# Between two attempts to get a lock.
_LOOK_SECONDS = 0.2


def location() -> Path:
    """The cache folder, which need not exist: `$TITANLAB_CACHE`, `$XDG_CACHE_HOME/titanlab`, or `~/.cache/titanlab`.

    Raises:
        ConfigError: no variable names one, and the user has no home.
    """
    if folder := os.environ.get(VARIABLE):
        return user_path(folder)
    if caches := os.environ.get("XDG_CACHE_HOME"):
        return Path(caches) / "titanlab"
    if (own := home()) is None:
        rule = "is not set, and this user has no home folder (no HOME, no passwd entry)"
        raise ConfigError(VARIABLE, None, rule, f"export {VARIABLE}=<a folder you can write to>")
    return own / ".cache" / "titanlab"


def root() -> Path:
    """The cache folder, created if it is missing.

    Raises:
        ConfigError: it cannot be written.
    """
    folder = location()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ConfigError(
            VARIABLE,
            folder,
            f"cannot be written ({error.strerror})",
            f"export {VARIABLE}=<a folder you can write to>",
        ) from error
    return folder


def build(
    folder: Path, make: Callable[[Path], None], *, report: Report, is_whole: Callable[[Path], bool] = Path.is_dir
) -> None:
    """Make a folder once, even if several processes call this at the same time.

    The folder appears complete or not at all: `make` fills a temporary folder beside it, which is then renamed.
    While one process makes the folder, the others wait.

    Args:
        folder: the folder to make; its parent is created.
        make: fills the folder whose path it receives.
        report: called when this process waits for another.
        is_whole: whether an existing folder can be used; if not, for example after a power cut, it is made again.

    Raises:
        ConfigError: the disk is full or the folder cannot be written.
    """
    if folder.is_dir() and is_whole(folder):
        return
    with _writable(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(f".{folder.name}.lock"), report) as alone:
            if folder.is_dir():
                if is_whole(folder):
                    return
                report(f"{folder} is damaged: making it again")
                shutil.rmtree(folder)
            prefix = f".{folder.name}.making-"
            if alone:
                # A killed process leaves its temporary folder behind.
                for leftover in folder.parent.glob(prefix + "*"):
                    shutil.rmtree(leftover, ignore_errors=True)
            _make_beside(folder, prefix, make)


def _make_beside(folder: Path, prefix: str, make: Callable[[Path], None]) -> None:
    temporary = folder.with_name(prefix + secrets.token_hex(6))
    temporary.mkdir()
    try:
        make(temporary)
        try:
            temporary.rename(folder)
        except OSError:
            # Without a working lock another process may have made the folder first; its content is the same.
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path, report: Report) -> Iterator[bool]:
    """Hold a file lock, which the system releases when this process ends; yields False where locks do not work."""
    with path.open("a+") as file:
        said = None
        try:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    pass
                # The wait lasts as long as that process lives: nobody knows how long the data takes.
                name, stopped = holder(file.fileno())
                words = f"waiting for {name}, which {stopped or 'prepares the same data'}"
                if words != said:
                    report(words)
                said = words
                time.sleep(_LOOK_SECONDS)
            name_holder(file.fileno())
            alone = True
        except OSError as error:
            # Some network file systems have no locks. The rename in `_make_beside` is safe without one, only slower.
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            alone = False
        yield alone


@contextlib.contextmanager
def _writable(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EFBIG):
            raise
        raise ConfigError(
            VARIABLE,
            folder.parent,
            f"prepared data cannot be written here ({error.strerror})",
            f"make room, or export {VARIABLE}=<a folder you can write to>",
        ) from error
