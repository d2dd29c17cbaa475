"""Recognises errors of a disk, a quota, a remote store or a run's folder that is gone; describes them in one line."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_WORDS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EFBIG: "a file would be larger than the limit of this process or file system",
    errno.ENOTDIR: "a file stands where a folder was",
}
_CURES = {
    errno.ENOSPC: "make room",
    errno.EDQUOT: "make room, or ask for a larger quota",
    errno.EROFS: "have it made writable again",
    errno.EFBIG: "raise the limit (ulimit -f)",
    errno.ENOTDIR: "move it away",
}
_STORE = "the store cannot be used"
_GONE = "the folder of the run is gone"
_PROBE_BYTES = 1 << 16
# A library may keep only the text of an error, without its number.
_MESSAGES = (
    (re.compile(r"No space left on device"), errno.ENOSPC),
    (re.compile(r"Disk quota exceeded"), errno.EDQUOT),
    (re.compile(r"Read-only file system"), errno.EROFS),
    (re.compile(r"File too large"), errno.EFBIG),
)


class StoreFault(OSError):
    """A remote store does not answer, refuses, or is gone.

    Args:
        address: of the folder or the object.
        reason: one line.
    """

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(f"{address}: {reason}")
        self.address, self.reason = address, reason

    def __reduce__(self) -> tuple[type[StoreFault], tuple[str, str]]:
        return (type(self), (self.address, self.reason))


class FolderGone(OSError):
    """A run's folder was moved or removed while the run went on.

    Args:
        folder: where it was.
    """

    def __init__(self, folder: str) -> None:
        super().__init__(f"{_GONE} ({folder})")
        self.folder = folder

    def __reduce__(self) -> tuple[type[FolderGone], tuple[str]]:
        return (type(self), (self.folder,))


def disk_fault(error: BaseException, *, ends_run: bool = True) -> str | None:
    """The fault of the disk, the store or the run's folder, and its cure, in one line; None if there is none.

    It also looks at the causes of the error, and at the other ranks' errors in torch's CheckpointException.

    Args:
        ends_run: whether the run has to be resumed when the cause is mended.
    """
    then = ", then go on with titanlab resume or retry" if ends_run else ""
    for cause in _causes(error):
        if isinstance(cause, StoreFault):
            return f"{_STORE} ({cause.address}: {cause.reason}): check its address, your access and the network{then}"
        if isinstance(cause, FolderGone):
            return f"{_GONE} ({cause.folder}): it was moved or removed while the run went on; resume it where it is now"
        number = cause.errno if isinstance(cause, OSError) else None
        if number not in _WORDS:
            number = next((number for text, number in _MESSAGES if text.search(str(cause))), None)
        if number is not None:
            file = cause.filename if isinstance(cause, OSError) else None
            where = f" ({file})" if isinstance(file, str) else ""
            return f"{_WORDS[number]}{where}: {_CURES[number]}{then}"
    return None


def tells_of_disk(cause: str | None) -> bool:
    """Whether the cause of an outcome is a text that `disk_fault` has returned."""
    return cause is not None and cause.startswith((_STORE, _GONE, *_WORDS.values()))


def refusal(folder: Path) -> OSError | None:
    """The error when bytes are appended to the files of a discarded folder; None if they can be appended.

    It finds the cause that writers in native code hide (torch 2.11 to 2.13: "unexpected pos 704 vs 598").
    """
    try:
        for path in sorted(folder.iterdir()):
            with path.open("ab", buffering=0) as file:
                file.write(bytes(_PROBE_BYTES))
    except OSError as error:
        # The error of a write has no file name.
        error.filename = str(folder.parent)
        return error
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and all its causes, without duplicates."""
    waiting, seen = [error], set[int]()
    while waiting:
        current = waiting.pop(0)
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        # CheckpointException: (error, traceback) of each rank that failed.
        failures: Any = getattr(current, "failures", None)
        if isinstance(failures, dict):
            waiting += [pair[0] for pair in failures.values() if isinstance(pair, tuple) and pair]
        waiting += [cause for cause in (current.__cause__, current.__context__) if cause is not None]
