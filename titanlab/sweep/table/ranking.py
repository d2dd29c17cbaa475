"""Ranks the recipes of a sweep by speed, MFU or memory, and says whether the first one is better by more than noise.

The unit is the run: steps of one run share its processes, its memory and its minutes, so that they say little about
another run of the same recipe. The noise of a run is the standard deviation of the logarithms of the figures of equal
recipes, pooled over all recipes that have repeats.

A recipe is named the winner if it is better than *each* other one at a family-wise error of at most 5 %: Student's t
with the pooled degrees of freedom, two-sided, at `ERROR` / (recipes - 1). These are the multiple comparisons with the
best of Edwards and Hsu (Journal of the American Statistical Association 78, 1983), with Bonferroni's inequality in
place of the tables of Dunnett's distribution: recipes may then have different numbers of runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from titanlab.sweep.table.comparison import groups
from titanlab.sweep.table.drift import Drift, drift_of
from titanlab.sweep.table.listing import Row
from titanlab.sweep.table.ranking_entry import COLUMN_OF, Entry, counted_runs, entry_of
from titanlab.sweep.table.ranking_text import drift_line, notes_of, sentence_of
from titanlab.sweep.table.student import t_quantile

# The probability of a wrong statement, for all statements about one sweep together. Of the 5 % that are promised,
# one hundredth is left for noise that is not quite normal.
ERROR = 0.04


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The recipes of a sweep, best first.

    Attributes:
        by: `tps`, `mfu` or `memory`; the least memory is the best.
        max_memory_gib: recipes that need more are left out; None: no limit.
        entries: the ranked recipes in their order, then those that are left out.
        winner: the first, if it is better than every other by more than noise. None: nobody can be named.
        runner_up: the second.
        gap_percent: by how much the first is better than the second: how many percent more it does, or less it needs.
        interval_percent: the interval of that gap, which holds for the comparisons with all others together; None if
            the noise is unknown.
        is_within_noise: whether nobody can be named because of noise; None: the noise is unknown, or nothing is there
            to compare.
        noise_percent: relative standard deviation of a run, pooled over the recipes with repeats; None without any.
        degrees: degrees of freedom of the noise.
        control: the runs of the sweep's control, which has no place; None: it has none, or none of them is done.
        control_gap_percent, control_interval_percent: of the first against the control, as for the runner-up, but as
            one comparison by itself.
        drift: of the control during the sweep; None unless two of its runs are done.
    """

    by: str
    max_memory_gib: float | None
    entries: tuple[Entry, ...]
    winner: Entry | None
    runner_up: Entry | None
    gap_percent: float | None
    interval_percent: tuple[float, float] | None
    is_within_noise: bool | None
    noise_percent: float | None
    degrees: int
    control: Entry | None
    control_gap_percent: float | None
    control_interval_percent: tuple[float, float] | None
    drift: Drift | None

    @property
    def ranked(self) -> tuple[Entry, ...]:
        """The entries that have a place."""
        return tuple(entry for entry in self.entries if entry.left_out is None)

    @property
    def left_out(self) -> tuple[Entry, ...]:
        """The entries that have none."""
        return tuple(entry for entry in self.entries if entry.left_out is not None)

    @property
    def first(self) -> Entry | None:
        """The entry with the best figure, whether or not it can be named the winner."""
        return next(iter(self.ranked), None)

    @property
    def sentence(self) -> str:
        """The answer in one sentence."""
        return sentence_of(self)

    @property
    def notes(self) -> list[str]:
        """What else one has to know to believe the answer: one sentence each."""
        return notes_of(self)

    def to_mapping(self) -> dict[str, Any]:
        """The ranking as plain values."""
        return {
            "by": self.by,
            "max_memory_gib": self.max_memory_gib,
            "sentence": self.sentence,
            "notes": self.notes,
            "winner": None if self.winner is None else self.winner.label,
            "runner_up": None if self.runner_up is None else self.runner_up.label,
            "gap_percent": self.gap_percent,
            "interval_percent": _list(self.interval_percent),
            "is_within_noise": self.is_within_noise,
            "noise_percent": self.noise_percent,
            "degrees_of_freedom": self.degrees,
            "control": None if self.control is None else self.control.to_mapping(),
            "control_gap_percent": self.control_gap_percent,
            "control_interval_percent": _list(self.control_interval_percent),
            "drift": None if self.drift is None else self.drift.to_mapping(),
            "recipes": [entry.to_mapping() for entry in self.entries],
        }


def rank(rows: Iterable[Row], *, by: str = "tps", max_memory_gib: float | None = None) -> Ranking:
    """Rank the recipes of a sweep's rows.

    Args:
        rows: of `titanlab.sweep.table.rows`.
        by: `tps` (tokens per second of one device), `mfu` or `memory`.
        max_memory_gib: leave out recipes of which a run needed more, or of which that is unknown.

    Raises:
        KeyError: `by` is none of these.
    """
    everything = [entry_of(group, by, max_memory_gib) for group in groups(rows)]
    entries = [entry for entry in everything if not entry.is_control]
    noise, degrees = _pooled(everything)
    sign = -1 if by == "memory" else 1
    ranked = sorted(
        (entry for entry in entries if entry.left_out is None),
        key=lambda entry: (-sign * (entry.centre or 0.0), entry.label),
    )
    comparisons = max(1, len(ranked) - 1)
    leads = [_lead(ranked[0], other, sign, noise, degrees, comparisons) for other in ranked[1:]]
    named = bool(leads) and noise is not None and all(low > 0 for _, low, _ in leads)
    placed = [
        _with_interval(replace(entry, is_within_noise=None if noise is None else low <= 0), noise, degrees)
        for entry, (_, low, _) in zip(ranked, [(0.0, 0.0, 0.0), *leads], strict=bool(ranked))
    ]
    controls = [entry for entry in everything if entry.is_control]
    control = max((entry for entry in controls if entry.figures), key=lambda entry: entry.runs, default=None)
    gap, interval = _gap(leads[0] if leads else None, sign)
    beyond = _lead(ranked[0], control, sign, noise, degrees, 1) if ranked and control is not None else None
    control_gap, control_interval = _gap(beyond, sign)
    return Ranking(
        by=by,
        max_memory_gib=max_memory_gib,
        entries=(*placed, *(entry for entry in entries if entry.left_out is not None)),
        winner=placed[0] if named else None,
        runner_up=placed[1] if leads else None,
        gap_percent=gap,
        interval_percent=interval,
        is_within_noise=not named if leads and noise is not None else None,
        noise_percent=None if noise is None else 100 * noise,
        degrees=degrees,
        control=None if control is None else _with_interval(control, noise, degrees),
        control_gap_percent=control_gap,
        control_interval_percent=control_interval,
        drift=None if control is None else _drift(control, entries, by),
    )


def drift_lines(rows: Sequence[Row]) -> list[str]:
    """The drift of the sweep's control in tokens/s, for the lines below a table; empty without a control."""
    if not any(row["control"] for row in rows):
        return []
    drift = rank(rows).drift
    return [] if drift is None else [drift_line(drift, "tps")]


def _pooled(entries: Sequence[Entry]) -> tuple[float | None, int]:
    """The standard deviation of a run's logarithm, pooled over all repeats, and its degrees of freedom.

    A recipe that does not fit into a limit of memory says as much about the noise as one that fits.
    """
    samples = [[math.log(figure) for figure in entry.figures] for entry in entries]
    degrees = sum(len(sample) - 1 for sample in samples if sample)
    return (math.sqrt(math.fsum(map(_squares, samples)) / degrees) if degrees else None), degrees


def _drift(control: Entry, entries: Sequence[Entry], by: str) -> Drift | None:
    """The drift of the control, held against the noise of the other recipes."""
    noise, degrees = _pooled(entries)
    squares = 0.0 if noise is None else noise**2 * degrees
    return drift_of(counted_runs(control.group, by), COLUMN_OF[by], squares=squares, degrees=degrees)


def _squares(sample: Sequence[float]) -> float:
    """The sum of the squared distances from the mean."""
    if len(sample) < 2:
        return 0.0
    mean = math.fsum(sample) / len(sample)
    return math.fsum((value - mean) ** 2 for value in sample)


def _lead(
    first: Entry, other: Entry, sign: int, noise: float | None, degrees: int, comparisons: int
) -> tuple[float, float, float]:
    """By how much the first is better than another, as a logarithm, and the ends of the interval of that."""
    assert first.centre is not None
    assert other.centre is not None
    lead = sign * (math.log(first.centre) - math.log(other.centre))
    if noise is None:
        return lead, -math.inf, math.inf
    half = t_quantile(degrees, ERROR / comparisons) * noise * math.sqrt(1 / first.runs + 1 / other.runs)
    return lead, lead - half, lead + half


def _with_interval(entry: Entry, noise: float | None, degrees: int) -> Entry:
    """The entry with the interval of its own centre."""
    if noise is None or entry.centre is None:
        return entry
    half = t_quantile(degrees, ERROR) * noise / math.sqrt(entry.runs)
    return replace(entry, low=entry.centre * _exp(-half), high=entry.centre * _exp(half))


def _gap(lead: tuple[float, float, float] | None, sign: int) -> tuple[float | None, tuple[float, float] | None]:
    """A lead and its interval in percent; None for what is unknown."""
    if lead is None:
        return None, None
    centre, low, high = lead
    is_known = not math.isinf(low)
    return _percent(centre, sign), (_percent(low, sign), _percent(high, sign)) if is_known else None


def _list(interval: tuple[float, float] | None) -> list[float] | None:
    return None if interval is None else list(interval)


def _percent(lead: float, sign: int) -> float:
    """A lead in percent: how much more than the other; of memory, how much less."""
    return 100 * (_exp(lead) - 1) if sign > 0 else 100 * (1 - _exp(-lead))


def _exp(value: float) -> float:
    """The exponential; infinite where it exceeds a float, as for two runs of wild noise."""
    return math.inf if value > 700 else math.exp(value)
