"""Quantiles of Student's t against published tables."""

import pytest

from titanlab.sweep.ranking import t_quantile


@pytest.mark.parametrize(
    ("degrees", "error", "expected"),
    [
        (1, 0.05, 12.7062),
        (1, 0.001, 636.619),
        (2, 0.05, 4.30265),
        (3, 0.05, 3.18245),
        (4, 0.05, 2.77645),
        (5, 0.01, 4.03214),
        (10, 0.05, 2.22814),
        (30, 0.001, 3.64596),
        (120, 0.05, 1.97993),
        (1_000_000, 0.05, 1.95997),
    ],
)
def test_the_quantiles_are_those_of_the_tables(degrees, error, expected):
    assert t_quantile(degrees, error) == pytest.approx(expected, rel=2e-6)
