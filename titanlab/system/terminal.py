"""Output of a run for people: a table at the start, a line of progress, a panel at the end.

On a terminal the last line is redrawn in place: before the first step it names the current phase, later it shows the
progress. Every group of steps leaves a line, on a terminal, in a pipe and in a log. `NO_COLOR` and dumb terminals are
respected. Text from other programs cannot control the terminal. Text that cannot be written is dropped: failed output
does not end a run.
"""

from __future__ import annotations

import collections
import contextlib
import io
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TextIO

from titanlab.system.files import open_to_write
from titanlab.system.progress import COLOURS, PLAIN, Progress, kept_line, live_line, loss_text, plain_line
from titanlab.system.text import harmless, harmless_lines

_lost: list[OSError] = []


def open_closed_streams() -> None:
    """Give stdin, stdout and stderr the null device if the shell has closed them (`2>&-`).

    Otherwise the next file that is opened gets the descriptor number of the closed stream: text for stderr would be
    written into that file, and a rank could not start. Call this before any file is opened.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            # The system gives the lowest free descriptor. All lower descriptors are open by now, so it gives `number`.
            os.open(os.devnull, os.O_RDONLY if mode == "r" else os.O_WRONLY)
            os.set_inheritable(number, True)
            # Python has set the stream to None when it started.
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
    """If the stream is standard output, remember that text could not be written."""
    if stream is sys.stdout and not _lost:
        _lost.append(error)


def lost_output() -> OSError | None:
    """The first error since the last call by which text for standard output was lost; None: no text was lost."""
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
    """The present width of a terminal in columns; 80 if it is not known."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return os.get_terminal_size(stream.fileno()).columns or 80
    return 80


def can_show(stream: TextIO, text: str) -> bool:
    try:
        text.encode(stream.encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def simplified(text: str, stream: TextIO) -> str:
    """The text with replacements for characters that the stream's encoding does not have."""
    encoding = stream.encoding or "ascii"
    # Replace each character by exactly one, so that the columns of tables stay aligned.
    text = text.translate(str.maketrans("·×µ…−–→", "-xu.-->"))
    return text.encode(encoding, errors="replace").decode(encoding)


_TICK_SECONDS = 0.5
# Where no line is redrawn, a phase that lasts this long is printed as a line.
_SLOW_SECONDS = 30.0


Rows = Sequence[tuple[str, object]]
Tone = Literal["good", "halted", "bad"]

_REDRAW_SECONDS = 0.2
_CLEAR_LINE = "\r\x1b[2K"
_TONES: Mapping[str, str] = {"good": "green", "halted": "yellow", "bad": "red"}
_SIGNS = {"warning": "\x1b[33m", "error": "\x1b[31m"}


class Console:
    """The output of one process.

    Args:
        stream: for everything but warnings and errors; None: standard output.
        errors: for warnings and errors; None: standard error.
        log_file: gets every line too, without colours and with the time of day; lines are appended to an existing file.
        quiet: print only warnings and errors.
        environ: environment variables, for NO_COLOR and TERM; None: this process's.
        clock: monotonic time in seconds, which limits the rate of redrawing.
        time_of_day: returns the text that precedes each line of the log file.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        errors: TextIO | None = None,
        log_file: Path | None = None,
        quiet: bool = False,
        environ: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        time_of_day: Callable[[], str] = lambda: time.strftime("%H:%M:%S"),
    ) -> None:
        environ = os.environ if environ is None else environ
        self._stream = sys.stdout if stream is None else stream
        self._errors = sys.stderr if errors is None else errors
        self._log: TextIO | None = None
        if log_file is not None:
            descriptor = open_to_write(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            self._log = os.fdopen(descriptor, "a", encoding="utf-8", buffering=1)
        self._quiet = quiet
        self._environ = environ
        self._clock = clock
        self._time_of_day = time_of_day
        self._capable = is_capable(self._stream, environ)
        self._style = COLOURS if self._capable and not environ.get("NO_COLOR") else PLAIN
        self._unicode = can_show(self._stream, "━╸┄▁█╭")
        self._losses: collections.deque[float] = collections.deque(maxlen=64)
        self._latest: Progress | None = None
        # The latest progress that was printed as a line that stays.
        self._kept: Progress | None = None
        self._drawn_at = -float("inf")
        # Whether a line is drawn that can be redrawn in place.
        self._is_drawn = False
        # The phase, and when it began; and whether a line was printed because the phase takes long.
        self._phase: tuple[str, float] | None = None
        self._is_said = False
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        # For the thread that redraws the phase. Re-entrant: a signal's handler may print while its thread prints.
        self._lock = threading.RLock()

    @property
    def is_live(self) -> bool:
        return self._capable and not self._quiet

    def phase(self, text: str | None) -> None:
        """Show a phase with its seconds, until the next phase, the first progress, or a call with None.

        Where no line is redrawn, only a phase that lasts long is shown.
        """
        if self._quiet:
            return
        with self._lock:
            self._phase = None if text is None else (harmless(text), self._clock())
            self._is_said = False
            if text is not None and self._thread is None:
                self._thread = threading.Thread(target=self._tick, name="terminal", daemon=True)
                self._thread.start()
            if self.is_live:
                self._draw()

    def start(self, title: str, rows: Rows) -> None:
        """Print a table of (label, value) rows."""
        self._block(title, rows, border="cyan")

    def step(self, progress: Progress) -> None:
        """After a step, redraw the progress line, if there is one, at most five times a second."""
        with self._lock:
            self._latest = progress
            is_due = self._clock() - self._drawn_at >= _REDRAW_SECONDS
            if self._phase is not None:
                self._phase, is_due = None, True
            if self.is_live and is_due:
                self._draw()

    def log(self, progress: Progress) -> None:
        """Write a line after a group of steps: in full in the log file, shortened to the width of a terminal."""
        if progress.loss is not None:
            self._losses.append(progress.loss)
        line = plain_line(progress)
        self._to_log(line)
        with self._lock:
            self._phase = None
            if self.is_live:
                self._latest = self._kept = progress
                kept = kept_line(progress, columns=columns_of(self._stream)) + "\n"
                self._write(self._stream, self._clearing() + kept)
                self._draw()
            elif not self._quiet:
                self._write(self._stream, line + "\n")

    def validated(self, step: int, steps: int, loss: float) -> None:
        self.note(f"step {step:>{len(str(steps))}}/{steps}  validation loss {loss_text(loss)}")

    def note(self, text: str, *, coloured: bool = False) -> None:
        """Print lines above the progress line; `coloured`: the lines are titanlab's own, with colours to keep."""
        text = text if coloured else harmless_lines(text)
        self._to_log(text)
        if not self._quiet:
            self._above(self._stream, text + "\n")

    def warn(self, text: str) -> None:
        self._message("warning", text)

    def error(self, text: str) -> None:
        self._message("error", text)

    def end(self, title: str, rows: Rows, *, tone: Tone = "good", next_steps: Sequence[str] = ()) -> None:
        """Print the panel at a run's end, and below it commands to try next, where they are easy to copy."""
        self.settle()
        self._block(title, rows, border=_TONES[tone])
        if next_steps:
            self.note("\n".join(["next:", *(f"  {line}" for line in next_steps)]))

    def settle(self) -> None:
        """End the phase; draw the progress line once more, and leave it. Later progress is on a new line."""
        with self._lock:
            self._phase = None
            if self._latest not in (None, self._kept) and self.is_live:
                self._draw()
                self._write(self._stream, "\n")
            elif self._is_drawn:
                self._write(self._stream, self._clearing())
            self._latest, self._is_drawn = None, False

    def close(self) -> None:
        """End the phase and the progress line, and close the log file."""
        self.settle()
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
        if self._log is not None:
            with contextlib.suppress(OSError):
                self._log.close()
            self._log = None

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _draw(self) -> None:
        """Draw the phase or else the progress; if there is neither, remove the drawn line."""
        columns, phase = columns_of(self._stream), self._phase_line()
        if phase is not None:
            # Cut the line to the width: a line that wraps could not be redrawn in place.
            line = self._style.faint + phase[: columns - 1] + self._style.off
        elif self._latest is not None:
            line = live_line(self._latest, self._losses, columns=columns, style=self._style, unicode=self._unicode)
        elif self._is_drawn:
            line = ""
        else:
            return
        self._write(self._stream, _CLEAR_LINE + line)
        self._is_drawn, self._drawn_at = bool(line), self._clock()

    def _clearing(self) -> str:
        """The escape sequence that removes the drawn line; empty if no line is drawn."""
        return _CLEAR_LINE if self._is_drawn else ""

    def _phase_line(self) -> str | None:
        """The line of the phase, with its seconds; None if there is no phase."""
        if self._phase is None:
            return None
        text, seconds = self._phase[0], self._clock() - self._phase[1]
        return f"{text} … {seconds:.0f} s" if seconds >= 1 else f"{text} …"

    def _tick(self) -> None:
        """Redraw the phase every half a second; where no line is redrawn, print once that a phase takes long."""
        while not self._closed.wait(_TICK_SECONDS):
            with self._lock:
                if (line := self._phase_line()) is None or self._phase is None:
                    continue
                if self.is_live:
                    self._draw()
                elif not self._is_said and self._clock() - self._phase[1] >= _SLOW_SECONDS:
                    self._is_said = True
                    self.note(line)

    def _above(self, stream: TextIO, text: str) -> None:
        with self._lock:
            was_drawn = self._is_drawn
            if was_drawn:
                self._write(self._stream, self._clearing())
                self._is_drawn = False
            self._write(stream, text)
            if was_drawn:
                self._draw()

    def _message(self, word: str, text: str) -> None:
        line = harmless(" ".join(text.split()))
        self._to_log(f"{word}: {line}")
        has_colours = is_capable(self._errors, self._environ) and not self._environ.get("NO_COLOR")
        shown = f"{_SIGNS[word]}{word}:{COLOURS.off}" if has_colours else f"{word}:"
        self._above(self._errors, f"{shown} {line}\n")

    def _block(self, title: str, rows: Rows, *, border: str) -> None:
        title, rows = harmless(title), [(harmless(label), harmless_lines(str(value))) for label, value in rows]
        width = max((len(label) for label, _ in rows), default=0)
        plain = "\n".join([title, *(f"  {label:<{width}}  {value}" for label, value in rows)])
        self._to_log(plain)
        if self._quiet:
            return
        self._above(self._stream, self._panel(title, rows, border) if self.is_live else plain + "\n")

    def _panel(self, title: str, rows: Rows, border: str) -> str:
        # Imported here: rich takes time to import, and `titanlab --help` does not need it.
        from rich import box
        from rich.console import Console as RichConsole
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        coloured = self._style is not PLAIN
        table = Table.grid(padding=(0, 3))
        table.add_column(style="dim" if coloured else "", no_wrap=True)
        table.add_column(overflow="fold")
        for label, value in rows:
            table.add_row(Text(label), Text(str(value)))
        rich = RichConsole(
            file=io.StringIO(),
            force_terminal=True,
            color_system="standard" if coloured else None,
            width=columns_of(self._stream) - 1,
            legacy_windows=False,
            # Give rich this console's TERM, which may differ from the process's: rich takes 80 columns for `dumb`.
            _environ=self._environ,
        )
        lines = box.ROUNDED if self._unicode else box.ASCII
        heading = Text(title, style="bold" if coloured else "")
        colour = border if coloured else ""
        with rich.capture() as capture:
            rich.print(Panel(table, title=heading, title_align="left", border_style=colour, box=lines, expand=False))
        return capture.get()

    def _to_log(self, text: str) -> None:
        if self._log is None:
            return
        now = self._time_of_day()
        for line in text.splitlines():
            self._write(self._log, f"{now}  {line}\n")

    def _write(self, stream: TextIO, text: str) -> None:
        try:
            stream.write(text if can_show(stream, text) else simplified(text, stream))
            stream.flush()
        except BrokenPipeError:
            discard(stream)  # The reader of the pipe has ended (`| head`).
        except OSError as error:
            # The disk is full, or the terminal closed. A run goes on; a verb that only prints fails (`lost_output`).
            note_lost_output(stream, error)
        except ValueError:
            pass  # A closed file.


def error_line(text: str, *, errors: TextIO | None = None, environ: Mapping[str, str] | None = None) -> None:
    """Print an error in one line on standard error, for a process that has no `Console`."""
    Console(errors=errors, environ=environ).error(text)
