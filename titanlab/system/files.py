"""Reads and writes files, parses JSON, and explains the errors of disks.

Files are written atomically: a reader never sees half a file. A folder may come from a stranger, with traps in it:
named pipes, on which a reader waits forever, and symbolic links.
"""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""Beginning of the small file that a clone without Git LFS has in place of a large one."""


def write_text(path: Path, text: str, *, durable: bool = False) -> None:
    """Replace a file atomically, as UTF-8; its folder must exist.

    Args:
        durable: also wait until the data is on the disk, so that it survives a power failure.
    """
    write_bytes(path, text.encode(), durable=durable)


def write_bytes(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Replace a file atomically, as `write_text` does; if this fails, the file is unchanged."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Mapping[str, Any], *, durable: bool = False) -> None:
    """Replace a JSON file atomically; numbers that are not finite are written as null."""
    write_text(path, json.dumps(finite(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n", durable=durable)


def finite(value: Any) -> Any:
    """The value with None instead of NaN and infinity, which JSON does not have, and lists instead of tuples."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return value


MOST_BYTES = 1 << 30
"""A larger file of text or JSON is refused: titanlab does not write such files, and it would fill the memory."""
_PIECE_BYTES = 1 << 20


def open_to_read(path: Path) -> BinaryIO:
    """Open a regular file. OSError: it is missing, or not a regular file."""
    # Without O_NONBLOCK, opening a named pipe would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return open(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "is a folder", str(path))
    raise OSError(errno.EINVAL, "is not a regular file", str(path))


def read_bytes(path: Path, *, most_bytes: int = MOST_BYTES) -> bytes:
    """The content of a file. OSError: it cannot be read, is not a regular file, or has more than `most_bytes`."""
    with open_to_read(path) as file:
        content = read_at_most(file, most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"has more than {most_bytes} bytes", str(path))
    return content


def open_to_write(path: Path, flags: int) -> int:
    """Open a file in the folder of a run, with `os.open`'s flags. Returns a descriptor, which the caller closes.

    A symbolic link is not followed: in a stranger's folder it may lead to any file that the user may write.

    Raises:
        OSError: the file cannot be opened, is a symbolic link, or is not a regular file.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "is a symbolic link, which is not followed", str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return descriptor


def read_at_most(file: BinaryIO, most_bytes: int) -> bytes:
    """At most this many bytes of an open file. `file.read` would first allocate memory for `most_bytes`."""
    content = bytearray()
    while piece := file.read(min(_PIECE_BYTES, most_bytes - len(content))):
        content += piece
    return bytes(content)


def read_text(path: Path, *, most_bytes: int = MOST_BYTES) -> str:
    """The content of a UTF-8 file, with a line feed at the end of each line.

    Raises:
        OSError: the file cannot be read, is not a regular file, or has more than `most_bytes`.
        UnicodeDecodeError: the file is not UTF-8.
    """
    text = read_bytes(path, most_bytes=most_bytes).decode()
    return text.replace("\r\n", "\n").replace("\r", "\n")


def user_path(text: str | os.PathLike[str]) -> Path:
    """The path, with `~` as the user's home; `~NAME` without such a user stays unchanged, as in a shell.

    `Path.expanduser` would raise a RuntimeError for such a name, which users would see as a traceback.
    """
    return Path(os.path.expanduser(text))


def home() -> Path | None:
    """The user's home folder; None for a user without one, as in many containers: no HOME and no passwd entry."""
    folder = os.path.expanduser("~")
    return Path(folder) if os.path.isabs(folder) else None


# For each error number: what is wrong with the disk, and the cure.
_FAULTS = {
    errno.ENOSPC: ("the disk is full", "make room"),
    errno.EDQUOT: ("the disk quota is used up", "make room, or ask for a larger quota"),
    errno.EROFS: ("the file system is read-only", "have it made writable again"),
    errno.EFBIG: (
        "a file would be larger than the limit of this process or file system",
        "raise the limit (ulimit -f)",
    ),
    errno.ENOTDIR: ("a file stands where a folder was", "move it away"),
}
_STORE = "the store cannot be used"
_GONE = "the folder of the run is gone"
_PROBE_BYTES = 1 << 16


class StoreFault(OSError):
    """A remote store does not answer, refuses access, or is gone."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(f"{address}: {reason}")
        self.address, self.reason = address, reason

    def __reduce__(self) -> tuple[type[StoreFault], tuple[str, str]]:
        return (type(self), (self.address, self.reason))


class FolderGone(OSError):
    """A run's folder was moved or removed while the run went on."""

    def __init__(self, folder: str) -> None:
        super().__init__(f"{_GONE} ({folder})")
        self.folder = folder

    def __reduce__(self) -> tuple[type[FolderGone], tuple[str]]:
        return (type(self), (self.folder,))


def disk_fault(error: BaseException, *, ends_run: bool = True) -> str | None:
    """The fault of the disk, the store or the run's folder, and its cure, in one line; None for other errors.

    The fault is also looked for in the error's causes, and in other ranks' errors in torch's CheckpointException.

    Args:
        ends_run: whether the line says that the run must be resumed after the cure.
    """
    then = ", then go on with titanlab resume or retry" if ends_run else ""
    for cause in _causes(error):
        if isinstance(cause, StoreFault):
            return f"{_STORE} ({cause.address}: {cause.reason}): check its address, your access and the network{then}"
        if isinstance(cause, FolderGone):
            return f"{_GONE} ({cause.folder}): it was moved or removed while the run went on; resume it where it is now"
        number = cause.errno if isinstance(cause, OSError) else None
        if number not in _FAULTS:
            # A library may keep only the text of an error, without its number.
            texts = {each: os.strerror(each) for each in _FAULTS if each != errno.ENOTDIR}
            number = next((each for each, text in texts.items() if text in str(cause)), None)
        if number is not None:
            file = cause.filename if isinstance(cause, OSError) else None
            where = f" ({file})" if isinstance(file, str) else ""
            words, cure = _FAULTS[number]
            return f"{words}{where}: {cure}{then}"
    return None


def tells_of_disk(cause: str | None) -> bool:
    """Whether the cause of an outcome is a text from `disk_fault`."""
    return cause is not None and cause.startswith((_STORE, _GONE, *(words for words, _ in _FAULTS.values())))


def refusal(folder: Path) -> OSError | None:
    """Append bytes to the files of a folder that will be discarded. Returns the error; None if that works.

    This finds the cause of a failed write, which native code hides (torch 2.11 to 2.13: "unexpected pos 704 vs 598").
    """
    try:
        for path in sorted(folder.iterdir()):
            with path.open("ab", buffering=0) as file:
                file.write(bytes(_PROBE_BYTES))
    except OSError as error:
        # The error of a write does not name the file.
        error.filename = str(folder.parent)
        return error
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    waiting, seen = [error], set[int]()
    while waiting:
        current = waiting.pop(0)
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        # CheckpointException has (error, traceback) of each rank that failed.
        failures: Any = getattr(current, "failures", None)
        if isinstance(failures, dict):
            waiting += [pair[0] for pair in failures.values() if isinstance(pair, tuple) and pair]
        waiting += [cause for cause in (current.__cause__, current.__context__) if cause is not None]


# A whole number of at most this many digits fits into a float. Python cannot convert a much larger one to a float.
_MOST_DIGITS = 308


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: the text is not JSON in UTF-8, is nested too deeply, or has a whole number too large for a float.
        The message is one line.
    """
    try:
        return json.loads(text, parse_int=_whole_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _whole_number(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError("a number in it is larger than any float")
    return int(digits)
