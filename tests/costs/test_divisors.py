"""Divisors of a number."""

from titanlab.costs import divisors


def test_divisors():
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert divisors(9) == [1, 3, 9]
    assert divisors(1) == [1]
