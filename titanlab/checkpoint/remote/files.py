"""Bytes of one object of a remote store: written in sequence, read in ranges."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from titanlab.checkpoint.damage import DamagedFile
from titanlab.checkpoint.remote.address_schema import StorePath
from titanlab.checkpoint.remote.objects import check_length, filesystem, size_of, store_errors, tried

# Size of one request: large enough that its latency counts little. Several requests run at once.
_PIECE = 8 << 20
_PIECES = 8
_PART = 64 << 20
# S3 takes 10,000 parts of one object.
_MOST_PARTS = 9_000


class StoreSink:
    """A new object. It is there after `finish`, and as a whole only.

    Args:
        size: of the object, in bytes.
    """

    def __init__(self, path: StorePath, size: int) -> None:
        self._path = path
        part = max(_PART, -(-size // _MOST_PARTS))
        with store_errors(path):
            store, name = filesystem(path)
            self._file: Any = store.open(name, "wb", block_size=part)
        self._is_finished = False

    def write(self, content: memoryview) -> None:
        """Append bytes."""
        with store_errors(self._path):
            self._file.write(content)

    def finish(self) -> None:
        """Send what is buffered; the store has the object when this returns."""
        with store_errors(self._path):
            self._file.close()
        self._is_finished = True

    def close(self) -> None:
        """Give up the object unless it is finished."""
        if self._is_finished or getattr(self._file, "closed", False):
            return
        discard: Callable[[], None] | None = getattr(self._file, "discard", None)
        # The error that is under way says more than one of the clean-up.
        with contextlib.suppress(Exception):
            if discard is not None:
                discard()
        # Else a buffered file of fsspec would complete the upload when it is collected as garbage.
        with contextlib.suppress(AttributeError):
            self._file.closed = True


class StoreSource:
    """Reads ranges of an object.

    Attributes:
        size: of the object, in bytes.
        most: bytes that are read at once.

    Raises:
        DamagedFile: there is no such object.
        StoreFault: the store does not answer, or refuses.
    """

    most = _PIECE * _PIECES

    def __init__(self, path: StorePath) -> None:
        self._path = path
        try:
            self.size = size_of(path)
        except FileNotFoundError:
            raise DamagedFile(f"its file {path.name} is missing") from None

    def read(self, target: memoryview, at: int) -> None:
        """Fill bytes with the range that begins at `at`; pieces of it are requested at once."""
        starts = range(at, at + len(target), _PIECE)
        ends = [min(start + _PIECE, at + len(target)) for start in starts]

        def read() -> None:
            store, name = filesystem(self._path)
            pieces = store.cat_ranges([name] * len(ends), list(starts), ends, on_error="raise")
            for start, end, piece in zip(starts, ends, pieces, strict=True):
                check_length(len(piece), end - start)
                target[start - at : end - at] = piece

        try:
            tried(read, self._path)
        except FileNotFoundError:
            raise DamagedFile(f"its file {self._path.name} is missing") from None

    def close(self) -> None:
        """Nothing is open."""
