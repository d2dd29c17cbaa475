"""Reads whole files that may come from a stranger; a named pipe, from which a read may never end, is refused."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

MOST_BYTES = 1 << 30
"""A larger file of text or JSON is refused: it is none of ours, and would fill the memory."""


def read_bytes(path: Path, *, most_bytes: int = MOST_BYTES) -> bytes:
    """The content of a file.

    Raises:
        OSError: it cannot be read, is no regular file, or is larger than that.
    """
    # Without O_NONBLOCK the open of a named pipe would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, "is a folder", str(path))
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is no regular file", str(path))
        # A read of so many bytes would reserve memory for all of them, which a limit of the process may not allow.
        if status.st_size > most_bytes:
            raise OSError(errno.EFBIG, f"has more than {most_bytes} bytes", str(path))
        return file.read()


def read_text(path: Path, *, most_bytes: int = MOST_BYTES) -> str:
    """The content of a UTF-8 file, with a line feed at the end of each line.

    Raises:
        OSError: it cannot be read, is no regular file, or is larger than that.
        UnicodeDecodeError: it is no UTF-8.
    """
    text = read_bytes(path, most_bytes=most_bytes).decode()
    return text.replace("\r\n", "\n").replace("\r", "\n")
