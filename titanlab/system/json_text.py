"""The one way to parse JSON that this process has not just written itself: of files, pipes and other programs."""

from __future__ import annotations

import json
from typing import Any

# The digits of the largest float. Who compares a longer number with one, or writes it as one, would get an error.
_MOST_DIGITS = 308


def parse_json(text: str | bytes, **hooks: Any) -> Any:
    """The value of a JSON text.

    Args:
        hooks: further arguments of `json.loads`; `parse_int=None` leaves the length of numbers unchecked, and is faster
            for texts of a million numbers.

    Raises:
        ValueError: it is no JSON in UTF-8, is nested too deeply, or has a whole number that no float can hold. The
            message is one line.
    """
    try:
        return json.loads(text, **{"parse_int": _whole_number, **hooks})
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _whole_number(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError("a number in it is larger than any float")
    return int(digits)
