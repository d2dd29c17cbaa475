"""The fit finds a minimum, is robust against one wrong row, and stays inside the limits."""

import dataclasses
import math

import pytest

from titanlab.plan.calibration import fit, fit_sum
from titanlab.plan.machine import LIMITS, Efficiencies


def errors_of(rows):
    """Rows of (compute, send): a time of compute / product + send / link, measured with 0.5 and 0.25."""

    def errors(values):
        return [
            math.log((compute / values.product + send / values.link) / (measured or compute / 0.5 + send / 0.25))
            for compute, send, measured in rows
        ]

    return errors


ROWS = [(1.0, 0.1, None), (1.0, 1.0, None), (0.1, 1.0, None), (2.0, 0.3, None), (0.5, 0.9, None)]


def test_it_finds_the_values():
    found = fit(errors_of(ROWS * 4), Efficiencies(product=0.9, link=0.9), ["product", "link"])
    assert found.product == pytest.approx(0.5, rel=0.01)
    assert found.link == pytest.approx(0.25, rel=0.01)


def test_parameters_that_are_not_named_stay():
    start = Efficiencies(product=0.9, link=0.9, network=0.3)
    found = fit(errors_of(ROWS), start, ["product", "link"])
    assert dataclasses.replace(found, product=0.9, link=0.9) == start


def test_a_parameter_that_no_row_depends_on_stays():
    start = Efficiencies(product=0.9, link=0.9)
    found = fit(errors_of(ROWS), start, list(LIMITS))
    assert found.stragglers == pytest.approx(start.stragglers, rel=1e-3)
    assert found.launch_seconds == pytest.approx(start.launch_seconds, rel=1e-6)


def test_one_wrong_row_does_not_decide():
    rows = [*ROWS * 4, (1.0, 0.1, 100.0)]
    found = fit(errors_of(rows), Efficiencies(product=0.9, link=0.9), ["product", "link"])
    assert found.product == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize("measured", [1e-9, 1e9])
def test_values_stay_inside_their_limits(measured):
    found = fit(errors_of([(1.0, 1.0, measured)]), Efficiencies(), list(LIMITS))
    for name, (least, most) in LIMITS.items():
        assert least <= getattr(found, name) <= most


def test_the_factors_of_a_sum_in_spite_of_a_bad_row():
    ones, sizes, others = [1.0] * 6, [1e9, 2e9, 3e9, 4e9, 5e9, 6e9], [0.0, 5.0, 1.0, 0.0, 7.0, 2.0]
    measured = [0.3e9 + 1.5 * size + 1e8 * other for size, other in zip(sizes, others, strict=True)]
    factors = fit_sum([ones, sizes, others], [*measured[:-1], 1.4 * measured[-1]])
    assert factors == pytest.approx([0.3e9, 1.5, 1e8], rel=1e-2)


def test_a_term_whose_factor_would_be_negative_is_left_out():
    sizes = [1.0, 2.0, 3.0, 4.0]
    factors = fit_sum([[1.0] * 4, sizes], [9.0, 8.0, 7.0, 6.0])
    assert factors[1] == 0.0
    assert 6.0 <= factors[0] <= 9.0


def test_where_rows_do_not_decide_the_start_holds():
    factors = fit_sum([[1.0, 1.0], [2.0, 2.0], [0.0, 0.0]], [7.0, 7.0], [3.0, 2.0, 5.0])
    assert factors == pytest.approx([3.0, 2.0, 5.0])
    # A term that no row has keeps its factor.
    assert fit_sum([[0.0]], [1.0], [4.0]) == [4.0]
