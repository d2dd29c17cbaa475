"""Lines of a log that may be huge, still written, or no text: read forward, backward, or as they are added."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

MOST_LINE_BYTES = 1 << 20
"""A longer line is cut into pieces, so that a file without line ends does not fill the memory."""
_BLOCK_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Span:
    """A part of a file.

    Attributes:
        start, end: in bytes; an end after the file's end stands for the file's end.
    """

    path: Path
    start: int
    end: int


def open_log(path: Path) -> BinaryIO:
    """Open a file for reading.

    Raises:
        OSError: it cannot be read, or is no regular file.
    """
    # Without O_NONBLOCK the open of a named pipe would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is no regular file", str(path))
    return open(descriptor, "rb")


def text_at_end(path: Path, *, begin: int = 0) -> str:
    """The last 64 KiB of a file; empty if it cannot be read, or is no regular file.

    Args:
        begin: bytes before this one are left out.
    """
    try:
        with open_log(path) as file:
            file.seek(max(begin, file.seek(0, os.SEEK_END) - _BLOCK_BYTES, 0))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def size_of(path: Path) -> int:
    """The size of a file; 0 if it is missing or is no regular file."""
    try:
        status = path.stat()
    except OSError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def complete_end(path: Path, end: int) -> int:
    """The position after the last line end before a position; the position itself if a line is longer than a block."""
    with open_log(path) as file:
        begin = max(0, end - _BLOCK_BYTES)
        file.seek(begin)
        block = file.read(end - begin)
    index = block.rfind(b"\n")
    if index >= 0:
        return begin + index + 1
    return 0 if begin == 0 else end


def forward(span: Span) -> Iterator[bytes]:
    """The lines of a part of a file, without their ends; nothing where the file has gone."""
    try:
        file = open_log(span.path)
    except OSError:
        return
    with file:
        file.seek(span.start)
        left = span.end - span.start
        while left > 0 and (line := file.readline(min(left, MOST_LINE_BYTES))):
            left -= len(line)
            yield line.removesuffix(b"\n")


def backward(span: Span) -> Iterator[bytes]:
    """The lines of a part of a file, the last one first; only what is asked for is read."""
    try:
        file = open_log(span.path)
    except OSError:
        return
    with file:
        position = min(span.end, size_of(span.path))
        rest, at_end = b"", True
        while position > span.start:
            begin = max(span.start, position - _BLOCK_BYTES)
            file.seek(begin)
            block = file.read(position - begin)
            if at_end:
                # The end of the last line begins no further line.
                block, at_end = block.removesuffix(b"\n"), False
            position = begin
            first, *others = block.split(b"\n")
            if others:
                others[-1] += rest
                yield from reversed(others)
                rest = first
            else:
                rest = first + rest
            if len(rest) > MOST_LINE_BYTES:
                yield rest
                rest = b""
        if not at_end:
            yield rest


@dataclass
class Growing:
    """The lines that are added to a file.

    Attributes:
        path: of the file, which may be missing, may vanish, and may come back.
        position: bytes that have been read.
        changed: whether the file was replaced or cut short since the latest call of `read`, and so was read anew.
    """

    path: Path
    position: int = 0
    changed: bool = False
    _number: int | None = None
    _rest: bytes = field(default=b"", repr=False)

    def read(self, *, last: bool = False) -> list[bytes]:
        """The lines that are new and complete; with `last` also a line without an end."""
        self.changed = False
        lines: list[bytes] = []
        try:
            with open_log(self.path) as file:
                status = os.fstat(file.fileno())
                if status.st_size < self.position or self._number not in (None, status.st_ino):
                    self.position, self._rest, self.changed = 0, b"", True
                self._number = status.st_ino
                file.seek(self.position)
                while block := file.read(_BLOCK_BYTES):
                    self.position += len(block)
                    *whole, self._rest = (self._rest + block).split(b"\n")
                    lines += whole
                    if len(self._rest) > MOST_LINE_BYTES:
                        lines.append(self._rest)
                        self._rest = b""
        except OSError:
            pass  # It is missing, or has vanished: it may come back.
        if last and self._rest:
            lines.append(self._rest)
            self._rest = b""
        return lines
