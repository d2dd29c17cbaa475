"""titanlab's own caches: prepared tokens and compiled code."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from titanlab.compile import cache as compile_cache
from titanlab.data import cache as data_cache
from titanlab.errors import ConfigError
from titanlab.records.claim import is_locked
from titanlab.sweep.cleaning.item import Item, is_old, item

_DATA_FOLDERS = ("tokens", "fingerprints")
_MAKING = ".making-"


def cached() -> Iterator[Item]:
    """What the caches hold, and what killed processes have left there."""
    root = compile_cache.own_folder()
    # A user without a home folder may have no cache of data.
    with contextlib.suppress(ConfigError):
        root = data_cache.location()
    for folder in (root / name for name in _DATA_FOLDERS):
        with contextlib.suppress(OSError):
            for path in sorted(folder.iterdir()):
                if path.name.endswith(".lock"):
                    continue
                is_left = _MAKING in path.name
                # Who makes `NAME` holds `.NAME.lock`, and fills `.NAME.making-…`.
                name = path.name.partition(_MAKING)[0].removeprefix(".") if is_left else path.name
                if (is_left and not is_old(path)) or is_locked(path.with_name(f".{name}.lock")):
                    continue
                entry = item("temporary" if is_left else "data-cache", path, root)
                if entry is not None:
                    yield entry
    for parent in dict.fromkeys((compile_cache.own_folder(), root)):
        if _is_own(parent):
            entry = item("compile-cache", parent / "inductor", parent)
            if entry is not None and entry.bytes:
                yield entry


def _is_own(folder: Path) -> bool:
    """Whether a folder is this user's, and no link: others may make one of this name in a folder for all."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
