"""Jobs and their elements as Slurm writes them: `sweep/run-TOKEN`; `0-3,7`, and in its listings `[0-9:2%4]`."""

from __future__ import annotations

import re
from collections.abc import Iterable

_PART = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?")
# MaxArraySize is at most 4,000,001.
_LARGEST = 4_000_000
# Slurm's lists of names end at commas; what else is not here may mean something to a shell or a file system.
_UNSAFE = re.compile(r"[^A-Za-z0-9._+/-]")


def job_name(sweep: str, run: str | None, token: str) -> str:
    """What jobs are called in the queue: `SWEEP/RUN-TOKEN`, or `SWEEP-TOKEN` for several runs.

    The accounting keeps 255 characters.
    """
    shown = sweep[:100] if run is None else f"{sweep[:100]}/{run[:110]}"
    return f"{_UNSAFE.sub('_', shown)}-{token}"


def token_of(name: str) -> str:
    """The token at the end of a job's name: `titanlab-TOKEN` too, as jobs were called once."""
    return name.rpartition("-")[2]


def elements_of(text: str) -> list[int]:
    """The elements that an expression names, without brackets and without its limit of jobs at once (`%4`).

    What is no expression, such as the `...` of one that was cut off, names none.
    """
    found: list[int] = []
    for part in text.strip("[]").partition("%")[0].split(","):
        match = _PART.fullmatch(part)
        if match is None:
            continue
        first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        if last <= _LARGEST and step:
            found += range(first, last + 1, step)
    return found


def expression_of(elements: Iterable[int]) -> str:
    """The shortest list of ranges that names these elements: `0-3,7`."""
    ranges: list[tuple[int, int]] = []
    for element in sorted(set(elements)):
        if ranges and element == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], element)
        else:
            ranges.append((element, element))
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
