"""A lock on a folder: one process at a time has it, for as long as it lives."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from titanlab.errors import ConfigError

FILE = ".claim"
# Whoever only asks whether a folder is claimed holds it for an instant: one refusal says nothing.
PATIENCE_SECONDS = 0.5
_RETRY_SECONDS = 0.05


class CannotWriteError(ConfigError):
    """The folder is another person's, on a disk that is read-only or full, or gone."""


@contextlib.contextmanager
def claimed(folder: Path, key: str, *, patience_seconds: float = PATIENCE_SECONDS, file: str = FILE) -> Iterator[None]:
    """Hold a folder for this process; the claim ends with the block, or with the process however it dies.

    Args:
        key: what the folder is, in the words of the error.
        patience_seconds: how long to wait for another holder.

    Raises:
        ConfigError: another process holds it.
        CannotWriteError: it cannot be written.
    """
    try:
        descriptor = os.open(folder / file, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        rule = f"cannot be written ({error.strerror or type(error).__name__})"
        raise CannotWriteError(key, folder, rule, "ask its owner, or work on a copy of it") from error
    try:
        if not _locked(descriptor, patience_seconds):
            holder = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
            raise ConfigError(key, folder, f"is in the hands of {holder}", "wait for it, or stop it")
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def is_claimed(folder: Path, *, file: str = FILE) -> bool:
    """Whether a live process holds the folder; False where the file system has no locks."""
    try:
        descriptor = os.open(folder / file, os.O_RDONLY)
    except OSError:
        # Missing, or of somebody who lets nobody look.
        return False
    try:
        # Shared, so that several who ask do not see each other.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def _locked(descriptor: int, patience_seconds: float) -> bool:
    end = time.monotonic() + patience_seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
            time.sleep(_RETRY_SECONDS)
        except OSError:
            return True  # A file system without locks: nobody can hold it.
        else:
            return True
