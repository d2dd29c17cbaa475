"""The output of a run's ranks: files of lines, read from either end, and merged by time.

Files may be huge, still growing, or binary. A line without a time gets the time of the line before it. Lines of a rank
that prints no times at all come at the end of their attempt: such a rank mostly prints only when it ends.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from titanlab.errors import ConfigError
from titanlab.records.files import read_optional
from titanlab.system import open_to_read, write_json

if TYPE_CHECKING:
    # Imported only for types: run_folder.py imports this module, to write marks.
    from titanlab.records.run_folder import RunFolder

MOST_LINE_BYTES = 1 << 20
"""A longer line is cut into pieces, so that a file without line ends does not fill the memory."""
_BLOCK_BYTES = 1 << 16


def text_at_end(path: Path, *, begin: int = 0) -> str:
    """The last 64 KiB of a file; empty if it cannot be read, or is not a regular file."""
    try:
        with open_to_read(path) as file:
            file.seek(max(begin, file.seek(0, os.SEEK_END) - _BLOCK_BYTES, 0))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def size_of(path: Path) -> int:
    """The size of a file; 0 if it is missing or is not a regular file."""
    try:
        status = path.stat()
    except OSError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def complete_end(path: Path, end: int) -> int:
    """The position after the last line end before `end`; `end` itself if the line there is longer than a block."""
    with open_to_read(path) as file:
        begin = max(0, end - _BLOCK_BYTES)
        file.seek(begin)
        index = file.read(end - begin).rfind(b"\n")
    return begin + index + 1 if index >= 0 else end if begin else 0


def forward(path: Path, start: int, end: int) -> Iterator[bytes]:
    """The lines between two positions of a file, without line ends; no lines if the file is missing."""
    try:
        file = open_to_read(path)
    except OSError:
        return
    with file:
        file.seek(start)
        left = end - start
        while left > 0 and (line := file.readline(min(left, MOST_LINE_BYTES))):
            left -= len(line)
            yield line.removesuffix(b"\n")


def backward(path: Path, start: int, end: int) -> Iterator[bytes]:
    """The lines of `forward` in reverse order; reads only as far as the caller iterates."""
    try:
        file = open_to_read(path)
    except OSError:
        return
    with file:
        position = min(end, size_of(path))
        rest, at_end = b"", True
        while position > start:
            begin = max(start, position - _BLOCK_BYTES)
            file.seek(begin)
            block = file.read(position - begin)
            if at_end:
                # The line end at the end of the range does not begin another, empty line.
                block, at_end = block.removesuffix(b"\n"), False
            position = begin
            rest, *others = (block + rest).split(b"\n")
            yield from reversed(others)
            if len(rest) > MOST_LINE_BYTES:
                yield rest
                rest = b""
        if not at_end:
            yield rest


@dataclass
class Growing:
    """Reads the lines that are added to a file, which may be missing, may vanish, and may come back."""

    path: Path
    position: int = 0  # bytes that have been read
    # Whether the latest call of `read` found the file replaced or cut short, and read it from the beginning.
    changed: bool = False
    _number: int | None = None
    _rest: bytes = field(default=b"", repr=False)

    def read(self, *, last: bool = False) -> list[bytes]:
        """The new complete lines; with `last` also an incomplete last line."""
        self.changed = False
        lines: list[bytes] = []
        with contextlib.suppress(OSError), open_to_read(self.path) as file:
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
        if last and self._rest:
            lines.append(self._rest)
            self._rest = b""
        return lines


MARKS = "logs.json"
"""A file in an attempt's folder: the sizes of the logs when the attempt began."""
SCHEMA = 1
_MOST_SECONDS = 4e9
_NAME = re.compile(r"rank-(\d{1,6})\.log")


@dataclass(frozen=True, kw_only=True)
class LogPart:
    """The bytes from `start` to `end` of a rank's log, which one attempt has written."""

    attempt: int
    rank: int
    path: Path
    start: int
    end: int
    # Estimates of when the attempt began, and when it wrote last, in seconds since the epoch.
    begin: float
    last: float


def rank_logs(run: RunFolder) -> dict[int, Path]:
    """The logs of a run by rank, in the order of ranks."""
    logs = {}
    with contextlib.suppress(OSError):
        for path in run.logs.iterdir():
            if match := _NAME.fullmatch(path.name):
                logs[int(match[1])] = path
    return dict(sorted(logs.items()))


def rank_log(run: RunFolder, rank: int) -> Path:
    """The path of a rank's log; the file need not exist."""
    return run.logs / f"rank-{rank}.log"


def write_marks(run: RunFolder, attempt: int) -> None:
    """Record the sizes of all logs before an attempt appends to them."""
    sizes = {str(rank): size for rank, path in rank_logs(run).items() if (size := size_of(path))}
    write_json(run.attempt_folder(attempt) / MARKS, {"schema": SCHEMA, "bytes": sizes})


def log_parts(run: RunFolder, rank: int, path: Path) -> list[LogPart]:
    """The parts of a rank's log, one for each attempt that may have written to it, oldest first.

    Output of an attempt without marks counts for the attempt before it. If somebody cuts a log short after an attempt
    wrote its marks, what is left counts for the last attempt.
    """
    size = size_of(path)
    starts: list[tuple[int, int]] = []
    for attempt in run.attempts():
        sizes = (read_optional(run.attempt_folder(attempt) / MARKS) or {}).get("bytes")
        start = sizes.get(str(rank), 0) if isinstance(sizes, dict) else None
        if isinstance(start, int) and start >= 0:
            if start > size or (starts and start < starts[-1][1]):
                starts = []
            starts.append((attempt, start if starts else 0))
    starts = starts or [(run.newest_attempt(), 0)]
    begins = [_begin(run, attempt) for attempt, _ in starts]
    ends = [start for _, start in starts[1:]] + [size]
    try:
        written = [*begins[1:], path.stat().st_mtime]
    except OSError:
        written = [*begins[1:], 0.0]
    return [
        LogPart(attempt=attempt, rank=rank, path=path, start=start, end=end, begin=begin, last=last)
        for (attempt, start), end, begin, last in zip(starts, ends, begins, written, strict=True)
    ]


def part_of(run: RunFolder, rank: int, path: Path, attempt: int) -> LogPart:
    """The part of a rank's log that an attempt has written. ConfigError: the beginning of the attempt is not known."""
    for part in log_parts(run, rank, path):
        if part.attempt == attempt:
            return part
    raise ConfigError("--attempt", attempt, "where it begins in the logs is not known", "leave --attempt out")


def _begin(run: RunFolder, attempt: int) -> float:
    """When an attempt began; 0 if that is not known."""
    time = (run.env(attempt) or {}).get("time") if attempt else None
    if not isinstance(time, int | float):
        with contextlib.suppress(ConfigError):
            time = run.created()
    # The file may contain anything: a date cannot have a year of a thousand digits.
    return float(time) if isinstance(time, int | float) and 0 <= time < _MOST_SECONDS else 0.0


# The time in titanlab's `12:30:00  text`, torch's `W1124 12:30:00.123`, logging's `2026-11-24 12:30:00,123`.
_TIME = re.compile(
    rb"(?:\[rank\d+\]:)?\s*(?:\[?[DIWEFC]\d{4} |\[?\d{4}-\d\d-\d\d[ T])?([01]\d|2[0-3]):([0-5]\d):([0-5]\d)(?!\d)"
)
_HALF_DAY = 43_200.0
# Number of lines to search for the first one with a time.
_LOOK_AHEAD = 500


@dataclass(frozen=True, kw_only=True, order=True)
class Line:
    """A line that a rank has printed; `time` in seconds since the epoch."""

    time: float
    rank: int
    text: bytes


def moment(text: bytes, near: float) -> float | None:
    """The time of a line, on the day that brings it nearest to the time `near`; None if the line has no time."""
    match = _TIME.match(text)
    if match is None:
        return None
    hour, minute, second = map(int, match.groups())
    same_day = datetime.fromtimestamp(near).replace(hour=hour, minute=minute, second=second, microsecond=0)
    days = (same_day + timedelta(days=days) for days in (-1, 0, 1))
    return min((day.timestamp() for day in days), key=lambda seconds: abs(seconds - near))


def timed(texts: Iterable[bytes], rank: int, *, begin: float, last: float) -> Iterator[Line]:
    """The lines of one attempt's part of a log, with times that never go back; for `begin` and `last` see `LogPart`."""
    rest = iter(texts)
    ahead = list(itertools.islice(rest, _LOOK_AHEAD))
    now = next((time for text in ahead if (time := moment(text, begin)) is not None), max(begin, last))
    for text in itertools.chain(ahead, rest):
        time = moment(text, now)
        # Printed times may decrease: clocks are set back, and libraries print times of another zone.
        now = now if time is None or time < now else time
        yield Line(time=now, rank=rank, text=text)


def timed_from_end(texts: Sequence[bytes], rank: int, *, last: float) -> list[Line]:
    """The last lines of a log, oldest first, with times that never decrease; `last`: when the log was last written."""
    times: list[float | None] = []
    now = last
    for text in reversed(texts):
        time = moment(text, now)
        # If the time of day is later than that of the next line, the line is from the day before.
        if time is not None and time > now:
            time = time - 2 * _HALF_DAY if time - now > _HALF_DAY else now
        now = now if time is None else time
        times.append(time)
    times.reverse()
    first = next((time for time in times if time is not None), last)
    lines = []
    for text, time in zip(texts, times, strict=True):
        first = first if time is None else max(first, time)
        lines.append(Line(time=first, rank=rank, text=text))
    return lines


def merged(logs: Iterable[Iterable[Line]]) -> Iterator[Line]:
    """The lines of all logs, sorted by time and then by rank; lines of one log keep their order."""
    return heapq.merge(*logs, key=lambda line: (line.time, line.rank))
