"""Opens files in folders that may come from a stranger: named pipes, which may never answer, and links are traps."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

MOST_BYTES = 1 << 30
"""A larger file of text or JSON is refused: it is none of ours, and would fill the memory."""
_PIECE_BYTES = 1 << 20


def read_bytes(path: Path, *, most_bytes: int = MOST_BYTES) -> bytes:
    """The content of a file.

    Raises:
        OSError: it cannot be read, is no regular file, or is larger than that.
    """
    # Without O_NONBLOCK the open of a named pipe would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        # Before `open`, which raises for a folder and leaves the descriptor open.
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, "is a folder", str(path))
        raise OSError(errno.EINVAL, "is no regular file", str(path))
    with open(descriptor, "rb") as file:
        content = read_at_most(file, most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"has more than {most_bytes} bytes", str(path))
    return content


def open_to_write(path: Path, flags: int) -> int:
    """A descriptor of a file in the folder of a run, with `os.open`'s flags. Close it.

    A symbolic link is not followed: in a stranger's folder it may lead to any file that the user may write.

    Raises:
        OSError: it cannot be opened, is a symbolic link, or is no regular file.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "is a symbolic link, which is not followed", str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is no regular file", str(path))
    return descriptor


def read_at_most(file: BinaryIO, most_bytes: int) -> bytes:
    """Up to this many bytes from an open file. `file.read` would first allocate memory for all of them."""
    content = bytearray()
    while piece := file.read(min(_PIECE_BYTES, most_bytes - len(content))):
        content += piece
    return bytes(content)


def read_text(path: Path, *, most_bytes: int = MOST_BYTES) -> str:
    """The content of a UTF-8 file, with a line feed at the end of each line.

    Raises:
        OSError: it cannot be read, is no regular file, or is larger than that.
        UnicodeDecodeError: it is no UTF-8.
    """
    text = read_bytes(path, most_bytes=most_bytes).decode()
    return text.replace("\r\n", "\n").replace("\r", "\n")
