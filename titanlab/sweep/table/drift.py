"""The drift of a sweep's control: how much an unchanged recipe became faster or slower while the sweep ran."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from titanlab.sweep.table.listing import Row
from titanlab.sweep.table.student import t_quantile

_ERROR = 0.05


@dataclass(frozen=True, kw_only=True)
class Drift:
    """A straight line through the control's figures.

    Attributes:
        percent: change from the first control's start to the last one's.
        interval_percent: of 95 %; None if nothing is known of the noise: two controls, and no repeats.
        runs: of the control, with a figure and a time.
        seconds: between the first and the last start.
    """

    percent: float
    interval_percent: tuple[float, float] | None
    runs: int
    seconds: float

    @property
    def is_within_noise(self) -> bool | None:
        """Whether it may be no drift at all; None if that is unknown."""
        if self.interval_percent is None:
            return None
        return self.interval_percent[0] <= 0 <= self.interval_percent[1]

    def to_mapping(self) -> dict[str, Any]:
        """The drift as plain values."""
        return {**asdict(self), "is_within_noise": self.is_within_noise}


def drift_of(rows: Sequence[Row], column: str, *, squares: float = 0.0, degrees: int = 0) -> Drift | None:
    """The drift of the control's runs in a column; None unless two of them have a figure, at different times.

    Args:
        squares: of the residuals of the recipes' repeats (logarithms), which tell of the noise too.
        degrees: of freedom of these.
    """
    known = [
        (row["started"], math.log(row[column]))
        for row in rows
        if row["started"] is not None and row[column] is not None and math.isfinite(row[column]) and row[column] > 0
    ]
    first, last = min((time for time, _ in known), default=0.0), max((time for time, _ in known), default=0.0)
    if last <= first:
        return None
    # From the first control (0) to the last (1): the slope is the change in all.
    times = [(time - first) / (last - first) for time, _ in known]
    mean_time = math.fsum(times) / len(known)
    mean = math.fsum(value for _, value in known) / len(known)
    points = [(time - mean_time, value - mean) for time, (_, value) in zip(times, known, strict=True)]
    width = math.fsum(time**2 for time, _ in points)
    slope = math.fsum(time * value for time, value in points) / width
    interval = None
    degrees += len(known) - 2
    if degrees:
        squares += math.fsum((value - slope * time) ** 2 for time, value in points)
        half = t_quantile(degrees, _ERROR) * math.sqrt(squares / degrees / width)
        interval = (_percent(slope - half), _percent(slope + half))
    return Drift(percent=_percent(slope), interval_percent=interval, runs=len(known), seconds=last - first)


def _percent(logarithm: float) -> float:
    return 100 * (math.exp(min(logarithm, 700.0)) - 1)
