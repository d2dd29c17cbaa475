"""An exclusive lock on a folder. One process at a time holds it; when that process ends, the lock is released."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from titanlab.errors import ConfigError
from titanlab.system import open_to_write, read_text, stopped_note

FILE = ".claim"
# If another process calls `is_claimed`, that call holds the lock for an instant: try again for this time.
PATIENCE_SECONDS = 0.5
_RETRY_SECONDS = 0.05
_HOLDER = r"process (\d+) on (.+)"


class CannotWriteError(ConfigError):
    """The lock file cannot be opened: no permission, a full or read-only disk, or no such folder."""


@contextlib.contextmanager
def claimed(folder: Path, key: str, *, patience_seconds: float = PATIENCE_SECONDS, file: str = FILE) -> Iterator[None]:
    """Lock a folder for this process; the kernel releases the lock when the block or the process ends.

    Raises:
        ConfigError: another process has the lock.
        CannotWriteError: the folder cannot be written.
    """
    try:
        descriptor = open_to_write(folder / file, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        rule = f"cannot be written ({error.strerror or type(error).__name__})"
        raise CannotWriteError(key, folder, rule, "ask its owner, or work on a copy of it") from error
    try:
        if not _locked(descriptor, patience_seconds):
            name, stopped = holder(descriptor)
            rule = f"is locked by {name}" + (f", which {stopped}" if stopped else "")
            raise ConfigError(key, folder, rule, "end that process" if stopped else "wait for it, or stop it")
        name_holder(descriptor)
        yield
    finally:
        os.close(descriptor)


def name_holder(descriptor: int) -> None:
    """Write into a lock file that this process has the lock."""
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)


def holder(descriptor: int) -> tuple[str, str]:
    """The process that holds a lock, from the lock file; and a clause that says if it is stopped, otherwise empty."""
    name = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
    known = re.fullmatch(_HOLDER, name)
    is_here = known is not None and known[2] == socket.gethostname()
    return name, stopped_note(int(known[1])) if known is not None and is_here else ""


def holder_of(folder: Path, *, file: str = FILE) -> tuple[str, int] | None:
    """Host and number of the process that holds, or held last, the lock of a folder; None: not known."""
    try:
        known = re.fullmatch(_HOLDER, read_text(folder / file))
    except (OSError, UnicodeDecodeError):
        return None
    return None if known is None else (known[2], int(known[1]))


def is_claimed(folder: Path, *, file: str = FILE) -> bool:
    """Whether a live process has locked the folder; False if the file system has no locks."""
    try:
        descriptor = os.open(folder / file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False  # There is no lock file, it may not be read, or it is a link, which no process locks.
    try:
        # A shared lock, so that several processes can call this function at the same time.
        return not _locked(descriptor, 0.0, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def _locked(descriptor: int, patience_seconds: float, kind: int = fcntl.LOCK_EX) -> bool:
    end = time.monotonic() + patience_seconds
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
            time.sleep(_RETRY_SECONDS)
        except OSError:
            return True  # The file system has no locks.
