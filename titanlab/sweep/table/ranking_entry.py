"""One recipe in a ranking: its figures of the runs that count, or why it has no place."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from titanlab.sweep.table.comparison import Group
from titanlab.sweep.table.listing import Row, word

COLUMN_OF = {"tps": "tokens_per_second", "mfu": "mfu_percent", "memory": "memory_gib"}
# In the convention of an MFU whose peak is not that of a datasheet: another run has measured another one.
MEASURED_PEAK = "measured on this CPU"
OWN_PEAK = "its MFU is a share of a peak that each run measured by itself; rank by tokens/s (--by tps)"
_OVERSUBSCRIBED = "oversubscribed: more processes than cores, so that its speed says nothing"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A recipe in a ranking.

    Attributes:
        group: its runs, and its name.
        figures: of the runs that count; empty if it is left out for want of them.
        centre: their geometric mean.
        low, high: the interval of 95 % around it; None if the noise is unknown.
        spread_percent: relative standard deviation of its own figures; None with fewer than two.
        memory_gib: the most that a run of it needed; None if unknown.
        is_within_noise: whether it may be as good as the first: True for the first itself. None if that is unknown.
        left_out: why it has no place in the ranking; None: it has one.
    """

    group: Group
    figures: tuple[float, ...] = ()
    centre: float | None = None
    low: float | None = None
    high: float | None = None
    spread_percent: float | None = None
    memory_gib: float | None = None
    is_within_noise: bool | None = None
    left_out: str | None = None

    @property
    def runs(self) -> int:
        """The number of runs that count."""
        return len(self.figures)

    @property
    def is_control(self) -> bool:
        """Whether it is the sweep's control: the recipe without the sweep's changes."""
        return self.group.is_control

    @property
    def label(self) -> str:
        """The recipe's short name."""
        return self.group.label

    @property
    def ends(self) -> dict[str, int]:
        """The number of its runs by outcome; by state if they have not ended."""
        return dict(Counter(map(word, self.group.rows)))

    def to_mapping(self) -> dict[str, Any]:
        """The entry as plain values."""
        return {
            "recipe": self.label,
            "layout": self.group.layout,
            "world": self.group.world,
            "differing": dict(self.group.differing),
            "is_control": self.is_control,
            "runs": [row["run"] for row in self.group.rows],
            "ends": self.ends,
            "figures": list(self.figures),
            "centre": self.centre,
            "interval": None if self.low is None else [self.low, self.high],
            "spread_percent": self.spread_percent,
            "memory_gib": self.memory_gib,
            "is_within_noise": self.is_within_noise,
            "left_out": self.left_out,
        }


def entry_of(group: Group, by: str, max_memory_gib: float | None) -> Entry:
    done = [row for row in group.rows if row["outcome"] == "done"]
    memory = max(_positive(done, "memory_gib"), default=None)
    counted = counted_runs(group, by)
    figures = tuple(_positive(counted, COLUMN_OF[by]))
    return Entry(
        group=group,
        figures=figures,
        centre=statistics.geometric_mean(figures) if figures else None,
        spread_percent=100 * statistics.stdev(map(math.log, figures)) if len(figures) > 1 else None,
        memory_gib=memory,
        left_out=_reason(group, done, counted, figures, by, memory, max_memory_gib),
    )


def counted_runs(group: Group, by: str) -> list[Row]:
    """The runs whose figures count: those that are done, and for a speed had a core for each process."""
    return [row for row in group.rows if row["outcome"] == "done" and (by == "memory" or not row["oversubscribed"])]


def _reason(
    group: Group,
    done: Sequence[Row],
    counted: Sequence[Row],
    figures: Sequence[float],
    by: str,
    memory: float | None,
    max_memory_gib: float | None,
) -> str | None:
    """Why a recipe has no place in the ranking; None if it has one."""
    if not done:
        ends = Counter(map(word, group.rows))
        return "no run is done: " + ", ".join(f"{count} {name}" for name, count in ends.items())
    if max_memory_gib is not None and memory is None:
        return "its memory is unknown, so that it cannot be held against the limit"
    if max_memory_gib is not None and memory is not None and memory > max_memory_gib:
        return f"needs {memory:.2f} GiB, more than {max_memory_gib:g}"
    if not counted:
        return _OVERSUBSCRIBED
    if by == "mfu" and any(MEASURED_PEAK in (row["mfu_convention"] or "") for row in counted):
        return OWN_PEAK
    if figures:
        return None
    if by == "mfu":
        return "has no MFU: the peak of its device is unknown"
    return "its memory was not measured" if by == "memory" else "its speed was not measured: no step after warm-up"


def _positive(rows: Sequence[Row], column: str) -> list[float]:
    """The figures of a column that can be compared as ratios."""
    known = (row[column] for row in rows)
    return [value for value in known if value is not None and math.isfinite(value) and value > 0]
