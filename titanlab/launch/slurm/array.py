"""Expressions for elements of Slurm's arrays: `0-3,7`, and in listings `[0-9:2%4]`."""

from __future__ import annotations

import re
from collections.abc import Iterable

_PART = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?")
# MaxArraySize is at most 4,000,001.
_LARGEST = 4_000_000


def elements_of(text: str) -> list[int]:
    """The elements of an expression, without the brackets and the limit of concurrent jobs (`%4`).

    Other text, such as the `...` of a shortened listing, is skipped.
    """
    elements: list[int] = []
    for part in text.strip("[]").partition("%")[0].split(","):
        match = _PART.fullmatch(part)
        if match is None:
            continue
        first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        if last <= _LARGEST and step:
            elements += range(first, last + 1, step)
    return elements


def expression_of(elements: Iterable[int]) -> str:
    """The shortest list of ranges for these elements: `0-3,7`."""
    ranges: list[tuple[int, int]] = []
    for element in sorted(set(elements)):
        if ranges and element == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], element)
        else:
            ranges.append((element, element))
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
