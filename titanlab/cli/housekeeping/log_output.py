"""Writes lines of logs to standard output: harmless on a terminal, unchanged bytes into a pipe or a file."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TextIO

from titanlab.records.logs import Line
from titanlab.system.terminal import Console, discard
from titanlab.system.text import harmless

_FLUSH_BYTES = 1 << 16


class LogOutput:
    """Standard output of `titanlab logs`.

    Args:
        width: of the number of a rank before each line; None: lines have no number.
        stream: None: standard output.
    """

    def __init__(self, *, width: int | None, stream: TextIO | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._width = width
        self._is_terminal = self._stream.isatty()
        self._waiting: list[bytes] = []
        self._bytes = 0
        self._is_open = True

    def widen(self, width: int) -> None:
        """Make room for the number of a higher rank, where lines have one."""
        if self._width is not None:
            self._width = max(self._width, width)

    def line(self, line: Line) -> bool:
        """Write a line. Returns False if nobody reads the output any more."""
        head = b"" if self._width is None else f"[rank {line.rank:>{self._width}}] ".encode()
        text = harmless(line.text.decode(errors="replace")).encode(errors="replace") if self._is_terminal else line.text
        self._waiting.append(head + text + b"\n")
        self._bytes += len(text)
        return self.flush() if self._bytes > _FLUSH_BYTES else self._is_open

    def note(self, text: str) -> None:
        """Say something about the logs, on standard error, so that the output has only lines of the logs."""
        self.flush()
        Console(sys.stderr).note(text)

    def flush(self) -> bool:
        """Write what waits. Returns False if nobody reads the output any more."""
        content = b"".join(self._waiting)
        self._waiting, self._bytes = [], 0
        if not content or not self._is_open:
            return self._is_open
        try:
            buffer = getattr(self._stream, "buffer", None)
            if buffer is None:
                self._stream.write(content.decode(errors="replace"))
            else:
                self._stream.flush()
                buffer.write(content)
                buffer.flush()
            self._stream.flush()
        except BrokenPipeError:
            self._is_open = False
            discard(self._stream)
        except OSError:
            self._is_open = False  # A full disk, or a closed terminal.
        return self._is_open

    def __enter__(self) -> LogOutput:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.flush()
