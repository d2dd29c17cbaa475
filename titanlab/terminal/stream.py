"""What an output stream is and can show: a terminal, its width, its characters."""

from __future__ import annotations

import contextlib
import io
import os
import re
import select
import sys
from collections.abc import Mapping
from typing import Any, TextIO

_SEQUENCE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_lost: list[OSError] = []


def open_closed_streams() -> None:
    """Give stdin, stdout and stderr the null device if the shell has closed them (`2>&-`).

    Otherwise the next file that is opened gets the number of the closed stream: what is meant for stderr would be
    written into it, and a rank could not start. Call it before any file is opened.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is given, and all below are open by now: it is this one.
            os.open(os.devnull, os.O_RDONLY if mode == "r" else os.O_WRONLY)
            os.set_inheritable(number, True)
            # For this process, Python has set the stream to None.
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))


def replace_unwritable(stream: TextIO) -> None:
    """Write `?` for characters that the stream's encoding does not have, such as a file's name that is not UTF-8."""
    if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
        stream.reconfigure(errors="replace")


def has_no_reader(stream: TextIO) -> bool:
    """Whether a stream is a pipe whose reader has ended (`| head`)."""
    try:
        poll = select.poll()
        poll.register(stream.fileno(), 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    except (OSError, ValueError):
        return False


def note_lost_output(stream: TextIO, error: OSError) -> None:
    """Remember that text for standard output could not be written, if the stream is that."""
    if stream is sys.stdout and not _lost:
        _lost.append(error)


def lost_output() -> OSError | None:
    """The first error since the last call for which text for standard output was lost; None: there was none."""
    return _lost.pop() if _lost else None


def discard(stream: TextIO) -> None:
    """Send what a stream has not yet written, and all that follows, to the null device.

    The interpreter flushes standard output again when it exits; that would fail and change the exit code.
    """
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def is_capable(stream: Any, environ: Mapping[str, str]) -> bool:
    """Whether a stream is a terminal that can move its cursor."""
    try:
        return bool(stream.isatty()) and environ.get("TERM", "") not in ("", "dumb", "unknown")
    except (AttributeError, ValueError):
        return False


def columns_of(stream: TextIO) -> int:
    """Width of a terminal, as it is now; 80 if it is not known."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError, AttributeError):
        columns = 0
    return columns or 80


def shown_width(line: str) -> int:
    """Columns of a line without its escape sequences."""
    return len(_SEQUENCE.sub("", line))


def can_show(stream: TextIO, text: str) -> bool:
    """Whether the stream's encoding has all characters of a text."""
    try:
        text.encode(stream.encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def simplified(text: str, stream: TextIO) -> str:
    """The text with replacements for characters that the stream's encoding does not have."""
    encoding = stream.encoding or "ascii"
    # One character for one, so that the columns of tables stay aligned.
    text = text.translate(str.maketrans("·×µ…−–→", "-xu.-->"))
    return text.encode(encoding, errors="replace").decode(encoding)
