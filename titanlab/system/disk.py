"""A disk that takes nothing more: full, over its quota, read-only. How such an error is known, and told in a line."""

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
}
_CURES = {
    errno.ENOSPC: "make room",
    errno.EDQUOT: "make room, or ask for a larger quota",
    errno.EROFS: "have it made writable again",
    errno.EFBIG: "raise the limit (ulimit -f)",
}
_PROBE_BYTES = 1 << 16
# What is left of the number where a library has made text of the error.
_MESSAGES = (
    (re.compile(r"No space left on device"), errno.ENOSPC),
    (re.compile(r"Disk quota exceeded"), errno.EDQUOT),
    (re.compile(r"Read-only file system"), errno.EROFS),
    (re.compile(r"File too large"), errno.EFBIG),
)


def disk_fault(error: BaseException) -> str | None:
    """What is wrong with the disk, and what to do about it, in a line; None where an error is of another kind.

    Errors that this one was raised from count, and those that torch's checkpoints carry for other ranks.
    """
    for each in _causes(error):
        number = each.errno if isinstance(each, OSError) else None
        if number not in _WORDS:
            number = next((number for text, number in _MESSAGES if text.search(str(each))), None)
        if number is not None:
            file = each.filename if isinstance(each, OSError) else None
            where = f" ({file})" if isinstance(file, str) else ""
            return f"{_WORDS[number]}{where}: {_CURES[number]}, then go on with titanlab resume or retry"
    return None


def tells_of_disk(cause: str | None) -> bool:
    """Whether the cause of an outcome is a line of `disk_fault`."""
    return cause is not None and cause.startswith(tuple(_WORDS.values()))


def refusal(folder: Path) -> OSError | None:
    """The error with which a disk refuses to lengthen the files of a folder that is given up; None: it does not.

    Writers in native code hide why they failed (torch's of 2.11 to 2.13: "unexpected pos 704 vs 598").
    """
    try:
        for path in sorted(folder.iterdir()):
            with path.open("ab", buffering=0) as file:
                file.write(bytes(_PROBE_BYTES))
    except OSError as error:
        # A write names no file.
        error.filename = str(folder.parent)
        return error
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and those behind it; each once."""
    waiting, seen = [error], set[int]()
    while waiting:
        each = waiting.pop(0)
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        # CheckpointException: (error, traceback) of each rank that failed.
        failures: Any = getattr(each, "failures", None)
        if isinstance(failures, dict):
            waiting += [pair[0] for pair in failures.values() if isinstance(pair, tuple) and pair]
        waiting += [behind for behind in (each.__cause__, each.__context__) if behind is not None]
