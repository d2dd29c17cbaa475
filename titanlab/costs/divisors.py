"""The divisors of a number: degrees and numbers of heads that a rule allows are among them."""

from __future__ import annotations

import math


def divisors(number: int) -> list[int]:
    """All divisors of a number, ascending."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
