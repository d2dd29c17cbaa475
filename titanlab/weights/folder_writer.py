"""A folder that appears complete or not at all: it is filled as `….part` and then renamed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from titanlab.errors import ConfigError
from titanlab.system.disk import StoreFault

PART = ".part"


def check_target(folder: Path, is_ours: Callable[[Path], bool], *, force: bool) -> None:
    """Check that a folder can be written; one with files is replaced only with `force`, and only if it has weights.

    Raises:
        ConfigError: the folder must not be replaced, or cannot be written.
    """
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists() and not force:
        raise ConfigError("--into", folder, "exists", "name another folder, or give --force to replace it")
    if folder.exists() and not is_ours(folder):
        raise ConfigError("--into", folder, "holds something else than weights", "name another folder")
    parent = next(path for path in folder.absolute().parents if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        rule = "cannot be written (no permission)" if parent.is_dir() else f"cannot be written ({parent} is no folder)"
        raise ConfigError("--into", folder, rule, "name a folder of yours")


def check_apart(source: Path, folder: Path) -> None:
    """Check that the folder to write does not overlap the folder that is read.

    Raises:
        ConfigError: they are the same folder, or one is in the other.
    """
    target, origin = folder.resolve(), source.resolve()
    if target == origin or origin in target.parents or target in origin.parents:
        raise ConfigError("--into", folder, "is the folder that is read, or lies in it", "name another folder")


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder, which replaces `folder` when the block ends without an error.

    Raises:
        ConfigError: another process is writing the folder, or it cannot be written.
    """
    folder = folder.absolute()
    part = folder.with_name(folder.name + PART)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        part.mkdir(exist_ok=True)
        lock = os.open(part, os.O_RDONLY)
    except OSError as error:
        raise _unwritable(folder, error) from error
    is_locked = False
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError("--into", folder, "is being written by another process", "wait for it") from None
        except OSError:
            pass  # This file system has no locks, so no other process can have one.
        is_locked = True
        # A process that died may have left files.
        for path in part.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        yield part
        _put_in_place(part, folder)
    except StoreFault:
        # Of the checkpoint that is read; the folder is not at fault.
        raise
    except OSError as error:
        raise _unwritable(folder, error) from error
    finally:
        os.close(lock)
        if is_locked:
            shutil.rmtree(part, ignore_errors=True)


def _put_in_place(part: Path, folder: Path) -> None:
    for path in part.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                # Before the rename: after a power cut a folder with the final name must be complete.
                os.fsync(file.fileno())
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    part.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    reason = error.strerror or type(error).__name__
    return ConfigError("--into", folder, f"cannot be written ({reason})", "name a folder of yours with room for it")
