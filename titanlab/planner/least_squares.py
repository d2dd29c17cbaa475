"""A small robust least-squares fit of efficiencies to measured runs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from titanlab.planner.efficiencies import LIMITS, Efficiencies

# Errors beyond this one count by their size and not by their square (Huber 1964): a row that the model cannot explain
# does not decide the fit. 5 % of the time.
_HUBER = 0.05
# Weight of the distance from the start, in which a parameter that no row depends on stays. One unit of a parameter's
# coordinate (a factor of 2.7 for most) counts as an error of 2 % in one row.
_PRIOR = 0.02
# The same for the factors of a sum.
_HELD = 1e-3
_ITERATIONS = 40
_DIFFERENCE = 1e-3
_SMALL = 1e-4
# Their limits are many orders of magnitude apart: their coordinate is the logarithm.
_LOGARITHMIC = ("launch_seconds", "latency")
_FLOOR = 1e-8  # seconds; its logarithm exists


def fit(
    errors: Callable[[Efficiencies], Sequence[float]],
    start: Efficiencies,
    names: Sequence[str],
    *,
    iterations: int = _ITERATIONS,
) -> Efficiencies:
    """The efficiencies with the smallest errors, by the Levenberg–Marquardt method.

    Args:
        errors: logarithm of estimated over measured, for each run.
        start: first values, and those of all parameters that are not in `names`.
        names: parameters to fit.
    """
    origin = point = np.array([_coordinate(name, getattr(start, name)) for name in names])

    def residuals(at: np.ndarray) -> np.ndarray:
        raw = np.asarray(errors(_values(start, names, at)), dtype=float)
        # Pseudo-Huber: the square of this grows as the error beyond _HUBER.
        robust = np.sign(raw) * _HUBER * np.sqrt(2 * (np.sqrt(1 + (raw / _HUBER) ** 2) - 1))
        return np.concatenate([robust, _PRIOR * (at - origin)])

    here, damping = residuals(point), 1e-2
    for _ in range(iterations):
        slopes = np.stack(
            [(residuals(point + _DIFFERENCE * unit) - here) / _DIFFERENCE for unit in np.eye(len(names))], axis=1
        )
        square, slope = slopes.T @ slopes, slopes.T @ here
        for _ in range(8):
            step = np.linalg.solve(square + damping * np.eye(len(names)), -slope)
            there = residuals(point + step)
            if there @ there < here @ here:
                damping /= 4
                break
            damping *= 4
        else:
            break
        gained = 1 - (there @ there) / (here @ here)
        point, here = point + step, there
        if gained < _SMALL:
            break
    return _values(start, names, point)


def fit_sum(
    terms: Sequence[Sequence[float]], measured: Sequence[float], start: Sequence[float] | None = None
) -> list[float]:
    """Factors, none negative, of a sum of terms with the smallest sum of absolute relative errors.

    By least squares whose weights are repeatedly those that make each error count by its size. A term whose factor
    would be negative is left out.

    Args:
        terms: values of each term, by row.
        measured: positive, by row.
        start: factors that hold where the rows do not decide; None: zero.
    """
    y = np.asarray(measured, dtype=float)
    shares = np.asarray(terms, dtype=float).T / y[:, None]
    first = np.zeros(len(terms)) if start is None else np.asarray(start, dtype=float)
    # Terms have different units: each is scaled by its largest share.
    scales = np.maximum(np.abs(shares).max(axis=0), np.finfo(float).tiny)
    free = np.abs(shares).max(axis=0) > 0
    solution = first.copy()
    while free.any():
        columns, origin = shares[:, free] / scales[free], first[free] * scales[free]
        rest = 1 - shares[:, ~free] @ solution[~free]
        weights = np.ones_like(y)
        for _ in range(_ITERATIONS):
            rows = np.concatenate([columns * weights[:, None], _HELD * np.eye(columns.shape[1])])
            factors = np.linalg.lstsq(rows, np.concatenate([rest * weights, _HELD * origin]), rcond=None)[0]
            weights = 1 / np.sqrt(np.maximum(np.abs(columns @ factors - rest), _SMALL))
        solution[free] = factors / scales[free]
        negative = solution < 0
        if not negative.any():
            break
        solution[negative] = 0.0
        free &= ~negative
    return [float(factor) for factor in solution]


def _values(start: Efficiencies, names: Sequence[str], point: np.ndarray) -> Efficiencies:
    return dataclasses.replace(
        start, **{name: _value(name, float(coordinate)) for name, coordinate in zip(names, point, strict=True)}
    )


def _coordinate(name: str, value: float) -> float:
    """A number without limits for a value inside its limits."""
    if name in _LOGARITHMIC:
        return math.log(max(value, _FLOOR))
    least, most = LIMITS[name]
    share = min(max((value - least) / (most - least), 1e-4), 1 - 1e-4)
    return math.log(share / (1 - share))


def _value(name: str, coordinate: float) -> float:
    least, most = LIMITS[name]
    if name in _LOGARITHMIC:
        return min(max(math.exp(min(coordinate, math.log(most))), least), most)
    share = 1 / (1 + math.exp(-max(min(coordinate, 50.0), -50.0)))
    return least + (most - least) * share
