"""Things that can be removed: kinds, sizes, and removal that never leaves its root and never follows a link."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from titanlab.checkpoint.folders import remove
from titanlab.checkpoint.remote.address_schema import Place, StorePath
from titanlab.errors import ConfigError
from titanlab.records.run_folder import RunFolder

KINDS = {
    "checkpoints": "older than resume and the rules of checkpoint.keep need, put aside, or damaged",
    "superseded": "checkpoints, traces and tokenizers of runs that were done anew; their records stay",
    "temporary": "left by interrupted saves, submissions and removals",
    "code": "copies of the code that no unfinished run uses",
    "data-cache": "prepared tokens; the next run on the same data makes them again",
    "compile-cache": "compiled code; the next run compiles again",
}
CACHES = ("data-cache", "compile-cache")
# Temporary names of `create_run`, `write_text`, snapshots of code, and of removals here.
TEMPORARY = re.compile(r"\..+\.(?:part|tmp|removing)")
# A process may still be writing what is younger.
YOUNG_SECONDS = 3600.0


@dataclass(frozen=True, kw_only=True)
class Item:
    """A file or a folder that can be removed.

    Attributes:
        kind: one of KINDS.
        path: it; of remote checkpoints an address.
        root: the folder that it must be in, after all links are followed.
        bytes: of its files.
        run: the run that must not be in use while it is removed; None: no run uses it.
    """

    kind: str
    path: Place
    root: Path
    bytes: int
    run: RunFolder | None = None


class Refused(Exception):
    """Why an item was left alone, in one line."""


def item(kind: str, path: Path, root: Path, run: RunFolder | None = None) -> Item | None:
    """The item of a path; None if it is a link, has gone, or lies outside its root."""
    if path.is_symlink() or not os.path.lexists(path) or not is_within(path, root):
        return None
    return Item(kind=kind, path=path, root=root, bytes=size_of_tree(path), run=run)


def is_within(path: Path, root: Path) -> bool:
    """Whether the folder of a path, after all links are followed, is in a root, and the path is not the root."""
    try:
        parent, real = path.parent.resolve(), root.resolve()
    except (OSError, RuntimeError):
        return False
    return (parent == real or parent.is_relative_to(real)) and parent / path.name != real


def size_of_tree(path: Path) -> int:
    """Bytes of the files in a folder, or of a file; links are not followed, and what vanishes counts nothing."""
    try:
        status = path.lstat()
    except OSError:
        return 0
    if not stat.S_ISDIR(status.st_mode):
        return status.st_size if stat.S_ISREG(status.st_mode) else 0
    total, waiting = 0, [str(path)]
    while waiting:
        with contextlib.suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    elif entry.is_file(follow_symlinks=False):
                        total += entry.stat(follow_symlinks=False).st_size
    return total


def is_old(path: Path, now: float | None = None) -> bool:
    """Whether nothing was written to a file, or directly into a folder, for an hour."""
    try:
        newest = max([path.lstat().st_mtime, *(inner.lstat().st_mtime for inner in _inner(path))])
    except OSError:
        return False
    return (time.time() if now is None else now) - newest > YOUNG_SECONDS


def _inner(path: Path) -> list[Path]:
    return list(path.iterdir()) if path.is_dir() and not path.is_symlink() else []


def remove_item(entry: Item) -> None:
    """Remove an item. While it gets another name, no process can begin to work on its run.

    Raises:
        Refused: it is in use, has become another thing, or cannot be removed.
    """
    path = entry.path
    try:
        if isinstance(path, StorePath):
            with contextlib.ExitStack() as stack:
                if entry.run is not None:
                    stack.enter_context(entry.run.claim())
                failure = remove(path)
            if failure is not None:
                raise failure
            return
        if path.is_symlink() or not is_within(path, entry.root):
            raise Refused("it is a link now, or lies elsewhere")
        away = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.removing")
        with contextlib.ExitStack() as stack:
            if entry.run is not None:
                stack.enter_context(entry.run.claim())
            path.rename(away)
        if away.is_dir() and not away.is_symlink():
            shutil.rmtree(away)
        else:
            away.unlink()
    except FileNotFoundError:
        return  # Somebody else has removed it.
    except ConfigError as error:
        raise Refused(error.rule) from None
    except OSError as error:
        raise Refused(error.strerror or type(error).__name__) from None
