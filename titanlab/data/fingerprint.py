"""Short hashes that stand for data: of files, and of anything made of plain values."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from titanlab.data import cache
from titanlab.system.atomic_file import write_text

WHOLE_BYTES = 256 << 20
"""Up to this many bytes in all, every byte of the files counts; above it, samples of each file."""
_BLOCK_BYTES = 64 << 10
_BLOCKS = 16
# A file changed this recently may change again without its time showing it.
_SETTLED_SECONDS = 2.0


def of_values(*values: object) -> str:
    """32 hexadecimal digits for plain values, in order."""
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=16).hexdigest()


def of_files(files: Sequence[Path]) -> str:
    """32 hexadecimal digits for the contents of files in their order; names and times do not count.

    Remembered in the cache under the files' paths, sizes and times, so that asking again reads nothing.

    Raises:
        OSError: a file cannot be read.
    """
    facts = [(os.path.abspath(path), path.stat()) for path in files]
    seen = tuple((path, fact.st_size, fact.st_mtime_ns, fact.st_ctime_ns) for path, fact in facts)
    newest = max((max(fact.st_mtime, fact.st_ctime) for _, fact in facts), default=0.0)
    return _read(seen) if newest > time.time() - _SETTLED_SECONDS else _remembered(seen)


@functools.cache
def _remembered(seen: tuple[tuple[str, int, int, int], ...]) -> str:
    note = cache.root() / "fingerprints" / of_values(1, seen)
    with contextlib.suppress(OSError):
        if len(found := note.read_text()) == 32:
            return found
    found = _read(seen)
    # A note only saves time: without it all is as well.
    with contextlib.suppress(OSError):
        note.parent.mkdir(exist_ok=True)
        write_text(note, found)
    return found


def _read(seen: tuple[tuple[str, int, int, int], ...]) -> str:
    whole = sum(size for _, size, _, _ in seen) <= WHOLE_BYTES
    total = hashlib.blake2b(digest_size=16)
    for path, size, _, _ in seen:
        total.update(f"{Path(path).suffix}:{size}:".encode())
        with open(path, "rb", buffering=0) as file:
            if whole or size <= _BLOCKS * _BLOCK_BYTES:
                total.update(file.read())
                continue
            for block in range(_BLOCKS):
                file.seek((size - _BLOCK_BYTES) * block // (_BLOCKS - 1))
                total.update(file.read(_BLOCK_BYTES))
    return total.hexdigest()
