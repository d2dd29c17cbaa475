"""Which logs a run has, and which part of each belongs to which attempt."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path

from titanlab.errors import ConfigError
from titanlab.records.json_file import read_optional
from titanlab.records.logs.lines import Span, size_of
from titanlab.records.run_records import RunRecords
from titanlab.system.files import write_json

MARKS = "logs.json"
"""In an attempt's folder: the sizes that the logs had when the attempt began."""
SCHEMA = 1
_MOST_SECONDS = 4e9
_NAME = re.compile(r"rank-(\d{1,6})\.log")


@dataclass(frozen=True, kw_only=True)
class Part:
    """The part of a rank's log that one attempt has written.

    Attributes:
        begin, end: when the attempt began, and when it wrote last, as well as it is known; seconds since the epoch.
    """

    rank: int
    span: Span
    begin: float
    end: float


def rank_logs(run: RunRecords) -> dict[int, Path]:
    """The logs of a run by rank, in the order of ranks."""
    logs = {}
    with contextlib.suppress(OSError):
        for path in run.logs.iterdir():
            if match := _NAME.fullmatch(path.name):
                logs[int(match[1])] = path
    return dict(sorted(logs.items()))


def rank_log(run: RunRecords, rank: int) -> Path:
    """The file of a rank, which need not exist."""
    return run.logs / f"rank-{rank}.log"


def write_marks(run: RunRecords, attempt: int) -> None:
    """Note the sizes of all logs, before an attempt adds to them."""
    sizes = {str(rank): size for rank, path in rank_logs(run).items() if (size := size_of(path))}
    write_json(run.attempt_folder(attempt) / MARKS, {"schema": SCHEMA, "bytes": sizes})


def parts(run: RunRecords, rank: int, path: Path) -> list[Part]:
    """The parts of a rank's log, one for each attempt that may have written to it, oldest first.

    Attempts that earlier versions of titanlab have begun have no marks; what they wrote belongs to the attempt before.
    """
    size = size_of(path)
    known = [(attempt, start) for attempt in run.attempts() if (start := _mark(run, attempt, rank)) is not None]
    starts: list[tuple[int, int]] = []
    for attempt, start in known or [(0, 0)]:
        if not starts or starts[-1][1] <= start <= size:
            starts.append((attempt, min(start, size) if starts else 0))
    log_parts = []
    for place, (attempt, start) in enumerate(starts):
        end = starts[place + 1][1] if place + 1 < len(starts) else size
        begin = _begin(run, attempt)
        log_parts.append(
            Part(
                rank=rank,
                span=Span(path=path, start=start, end=end),
                begin=begin,
                end=_written(path) if place + 1 == len(starts) else _begin(run, starts[place + 1][0]),
            )
        )
    return log_parts


def part_of(run: RunRecords, rank: int, path: Path, attempt: int) -> Part:
    """The part of a rank's log that an attempt has written.

    Raises:
        ConfigError: where the attempt begins was not recorded.
    """
    size, numbers = size_of(path), run.attempts()
    start = _mark(run, attempt, rank)
    if start is None and attempt != numbers[0]:
        raise ConfigError("--attempt", attempt, "was begun before logs were marked", "leave --attempt out")
    later = [mark for number in numbers if number > attempt and (mark := _mark(run, number, rank)) is not None]
    if start is None and len(numbers) > 1 and not later:
        raise ConfigError("--attempt", attempt, "was begun before logs were marked", "leave --attempt out")
    start = start or 0
    if start > size:
        # The log was cut short, or removed, since.
        start = 0
    end = next((mark for mark in later if mark >= start), size)
    span = Span(path=path, start=start, end=min(end, size))
    return Part(rank=rank, span=span, begin=_begin(run, attempt), end=_written(path))


def _mark(run: RunRecords, attempt: int, rank: int) -> int | None:
    """The size of a rank's log when an attempt began; None if that was not recorded."""
    value = (read_optional(run.attempt_folder(attempt) / MARKS) or {}).get("bytes")
    if not isinstance(value, dict):
        return None
    size = value.get(str(rank), 0)
    return size if isinstance(size, int) and size >= 0 else None


def _begin(run: RunRecords, attempt: int) -> float:
    """When an attempt began; 0 if that is not known."""
    time = (run.env(attempt) or {}).get("time") if attempt else None
    if not isinstance(time, int | float):
        with contextlib.suppress(ConfigError):
            time = run.created()
    # The file may be a stranger's: no date has a year of a thousand digits.
    return float(time) if isinstance(time, int | float) and 0 <= time < _MOST_SECONDS else 0.0


def _written(path: Path) -> float:
    """When a file was written last; 0 if it is missing."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
