"""The order of lines of several logs, by the time of day with which some of them begin.

A line without a time follows the line before it. Lines of a rank that prints no times at all come at the end of their
attempt: what such a rank prints is mostly its last words.
"""

from __future__ import annotations

import heapq
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

# `12:30:00  text` of titanlab, `W1124 12:30:00.123` of torch, `2026-11-24 12:30:00,123` of Python's logging.
_TIME = re.compile(
    rb"(?:\[rank\d+\]:)?\s*(?:\[?[DIWEFC]\d{4} |\[?\d{4}-\d\d-\d\d[ T])?([01]\d|2[0-3]):([0-5]\d):([0-5]\d)(?!\d)"
)
_HALF_DAY = 43_200.0
# How many lines are looked at to find the first one with a time.
_LOOK_AHEAD = 500


@dataclass(frozen=True, kw_only=True, order=True)
class Line:
    """A line of a rank.

    Attributes:
        time: seconds since the epoch, as well as it is known.
        rank: of the file.
        text: without its end; any bytes.
    """

    time: float
    rank: int
    text: bytes


def moment(text: bytes, near: float) -> float | None:
    """The time of a line, on the day on which it is nearest to a time that is known; None if it has none."""
    match = _TIME.match(text)
    if match is None:
        return None
    known = datetime.fromtimestamp(near)
    same_day = known.replace(hour=int(match[1]), minute=int(match[2]), second=int(match[3]), microsecond=0)
    days = {-1: same_day - timedelta(days=1), 0: same_day, 1: same_day + timedelta(days=1)}
    return min((day.timestamp() for day in days.values()), key=lambda seconds: abs(seconds - near))


def timed(texts: Iterable[bytes], rank: int, *, begin: float, end: float) -> Iterator[Line]:
    """The lines of one attempt's part of a log, with times that never fall.

    Args:
        begin: when the attempt began.
        end: when the part was written last.
    """
    rest = iter(texts)
    ahead = list(itertools.islice(rest, _LOOK_AHEAD))
    now = next((time for text in ahead if (time := moment(text, begin)) is not None), max(begin, end))
    for text in itertools.chain(ahead, rest):
        time = moment(text, now)
        # Clocks are set back, and libraries print times of another zone.
        now = now if time is None or time < now else time
        yield Line(time=now, rank=rank, text=text)


def timed_from_end(texts: Sequence[bytes], rank: int, *, end: float) -> list[Line]:
    """The last lines of a log, with times that never fall.

    Args:
        texts: the oldest first.
        end: when the log was written last.
    """
    times: list[float | None] = []
    now = end
    for text in reversed(texts):
        time = moment(text, now)
        # A time of day that is later than the next line's is the day before's.
        if time is not None and time > now:
            time = time - 2 * _HALF_DAY if time - now > _HALF_DAY else now
        now = now if time is None else time
        times.append(time)
    times.reverse()
    first = next((time for time in times if time is not None), end)
    lines = []
    for text, time in zip(texts, times, strict=True):
        first = first if time is None else max(first, time)
        lines.append(Line(time=first, rank=rank, text=text))
    return lines


def merged(logs: Iterable[Iterable[Line]]) -> Iterator[Line]:
    """All lines by time, and by rank where times are equal; lines of one log keep their order."""
    return heapq.merge(*logs, key=lambda line: (line.time, line.rank))
