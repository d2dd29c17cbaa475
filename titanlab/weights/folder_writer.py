"""A folder that is whole or absent: made beside its place as `….part`, and renamed when all is in it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from titanlab.errors import ConfigError

PART = ".part"


def check_target(folder: Path, is_ours: Callable[[Path], bool], *, force: bool) -> None:
    """The rule that a folder is written over only where a person says so, and only if it is what would be written.

    Raises:
        ConfigError: something is there, or it cannot be written.
    """
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists() and not force:
        raise ConfigError("--into", folder, "exists", "name another folder, or give --force to replace it")
    if folder.exists() and not is_ours(folder):
        raise ConfigError("--into", folder, "holds something else than weights", "name another folder")
    there = next(path for path in folder.absolute().parents if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        rule = "cannot be written (no permission)" if there.is_dir() else f"cannot be written ({there} is no folder)"
        raise ConfigError("--into", folder, rule, "name a folder of yours")


def check_apart(source: Path, folder: Path) -> None:
    """The rule that nothing is written over what is being read.

    Raises:
        ConfigError: they are the same folder, or one is in the other.
    """
    inside, outside = folder.resolve(), source.resolve()
    if inside == outside or outside in inside.parents or inside in outside.parents:
        raise ConfigError("--into", folder, "is the folder that is read, or lies in it", "name another folder")


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder to write into; it takes its place, or that of the one there, when the block ends well.

    Raises:
        ConfigError: another process is writing it, or the disk does not take it.
    """
    folder = folder.absolute()
    part = folder.with_name(folder.name + PART)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        part.mkdir(exist_ok=True)
        claim = os.open(part, os.O_RDONLY)
    except OSError as error:
        raise _unwritable(folder, error) from error
    mine = False
    try:
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError("--into", folder, "is being written by another process", "wait for it") from None
        except OSError:
            pass  # A file system without locks: nobody can hold it.
        mine = True
        # What a process left that died.
        for left in part.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        yield part
        _put_in_place(part, folder)
    except OSError as error:
        raise _unwritable(folder, error) from error
    finally:
        os.close(claim)
        if mine:
            shutil.rmtree(part, ignore_errors=True)


def _put_in_place(part: Path, folder: Path) -> None:
    for path in part.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                # Before the name says that it is whole: a power cut may come between the two.
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
