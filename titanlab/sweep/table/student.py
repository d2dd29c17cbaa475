"""Quantiles of Student's t for whole degrees of freedom: how wide an interval of few runs must be."""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

# From here on the normal distribution with the first correction for t is exact to seven digits.
_MANY = 10_000


def probability_within(t: float, degrees: int) -> float:
    """The probability that a value of Student's t lies between -t and t.

    Abramowitz and Stegun, Handbook of Mathematical Functions (1964), 26.7.3 and 26.7.4: finite sums, exact.
    """
    angle = math.atan(abs(t) / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = degrees % 2 == 1
    term = cosine if is_odd else 1.0
    total = 0.0 if degrees == 1 else term
    for power in range(2 if is_odd else 1, degrees - 1, 2):
        term *= cosine * cosine * power / (power + 1)
        total += term
    return (2 / math.pi) * (angle + sine * total) if is_odd else sine * total


@lru_cache(maxsize=1024)
def t_quantile(degrees: int, error: float) -> float:
    """The t beyond which, on both sides together, a value lies with the probability `error`.

    Args:
        degrees: of freedom, at least 1.
        error: 0.05 gives the quantile of an interval of 95 %.
    """
    if degrees > _MANY:
        normal = NormalDist().inv_cdf(1 - error / 2)
        return normal + (normal**3 + normal) / (4 * degrees)
    low, high = 0.0, 1.0
    while probability_within(high, degrees) < 1 - error:
        low, high = high, 2 * high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if probability_within(middle, degrees) < 1 - error else (low, middle)
    return high
