"""Short hashes that identify data: hashes of files, and of plain values."""

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
from titanlab.system.files import write_text

WHOLE_BYTES = 256 << 20
"""Files of up to this many bytes together are hashed completely; of larger ones, samples of each file."""
_BLOCK_BYTES = 64 << 10
_BLOCKS = 16
# A file that was changed so recently may change again within the resolution of its modification time.
_SETTLED_SECONDS = 2.0


def of_values(*values: object) -> str:
    """Hash plain values in their order; 32 hexadecimal digits."""
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=16).hexdigest()


def of_files(files: Sequence[Path]) -> str:
    """Hash the contents of files in their order, without names and times; 32 hexadecimal digits.

    The cache keeps the hash under the files' paths, sizes and times, so that the next call does not read them.

    Raises:
        OSError: a file cannot be read.
    """
    stats = [(os.path.abspath(path), path.stat()) for path in files]
    versions = tuple((path, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for path, stat in stats)
    newest = max((max(stat.st_mtime, stat.st_ctime) for _, stat in stats), default=0.0)
    return _hash(versions) if newest > time.time() - _SETTLED_SECONDS else _cached_hash(versions)


@functools.cache
def _cached_hash(versions: tuple[tuple[str, int, int, int], ...]) -> str:
    entry = cache.root() / "fingerprints" / of_values(1, versions)
    with contextlib.suppress(OSError):
        if len(digits := entry.read_text()) == 32:
            return digits
    digits = _hash(versions)
    # The cache entry only saves time, so an error while it is written is ignored.
    with contextlib.suppress(OSError):
        entry.parent.mkdir(exist_ok=True)
        write_text(entry, digits)
    return digits


def _hash(versions: tuple[tuple[str, int, int, int], ...]) -> str:
    whole = sum(size for _, size, _, _ in versions) <= WHOLE_BYTES
    total = hashlib.blake2b(digest_size=16)
    for path, size, _, _ in versions:
        total.update(f"{Path(path).suffix}:{size}:".encode())
        with open(path, "rb", buffering=0) as file:
            if whole or size <= _BLOCKS * _BLOCK_BYTES:
                total.update(file.read())
                continue
            for block in range(_BLOCKS):
                file.seek((size - _BLOCK_BYTES) * block // (_BLOCKS - 1))
                total.update(file.read(_BLOCK_BYTES))
    return total.hexdigest()
