"""The drift of a control: a straight line through its figures, and whether it may be noise."""

import math

import pytest

from titanlab.sweep.ranking import drift_of


def rows(*pairs):
    return [{"started": started, "speed": speed} for started, speed in pairs]


@pytest.mark.parametrize(
    "pairs",
    [
        [],
        [(0.0, 100.0)],
        [(5.0, 100.0), (5.0, 110.0)],
        [(None, 100.0), (5.0, 110.0)],
        [(0.0, 0.0), (5.0, 110.0)],
        [(0.0, math.nan), (5.0, 110.0)],
    ],
)
def test_without_two_figures_at_two_times_there_is_no_drift(pairs):
    assert drift_of(rows(*pairs), "speed") is None


def test_repeats_of_the_recipes_tell_of_the_noise_of_two_controls():
    wide = drift_of(rows((0.0, 100.0), (30.0, 110.0)), "speed", squares=0.1, degrees=10)
    narrow = drift_of(rows((0.0, 100.0), (30.0, 110.0)), "speed", squares=1e-6, degrees=10)
    assert (wide.is_within_noise, narrow.is_within_noise) == (True, False)
    low, high = narrow.interval_percent
    assert low < 10.0 < high
    # Student's t of 95 % with ten degrees of freedom is 2.228; both ends are half of the time away from the mean.
    half = 2.228 * math.sqrt(1e-6 / 10 / 0.5)
    assert (math.log(high / 100 + 1) - math.log(low / 100 + 1)) / 2 == pytest.approx(half, rel=1e-3)


def test_figures_on_one_line_have_no_noise_in_whatever_order_they_are():
    steady = [(10.0 * place, 100.0 * 1.1**place) for place in range(4)]
    for pairs in (steady, steady[::-1], [steady[2], steady[0], steady[3], steady[1]]):
        drift = drift_of(rows(*pairs), "speed")
        assert drift.percent == pytest.approx(33.1)
        assert drift.interval_percent == pytest.approx((33.1, 33.1), rel=1e-6)
        assert (drift.runs, drift.seconds, drift.is_within_noise) == (4, 30.0, False)


def test_a_control_that_goes_up_and_down_has_no_drift():
    drift = drift_of(rows((0.0, 100.0), (10.0, 120.0), (20.0, 100.0)), "speed")
    assert drift.percent == pytest.approx(0.0, abs=1e-9)
    assert drift.is_within_noise is True
