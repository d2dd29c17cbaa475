"""Groups a sweep's runs by recipe and compares the groups: noise, drift over time, and the entries of a ranking.

`drift_of` says how much a sweep's control, an unchanged recipe, became faster or slower while the sweep ran.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Any

from titanlab.sweep.columns import POINT, point_keys
from titanlab.sweep.listing import OVERSUBSCRIBED, Row, aligned, runs, word
from titanlab.system.text import grouped

# Together with the layout, these columns define a recipe; a column is shown if it differs within the sweep.
_RECIPE = (
    *("model", "layers", "dim", "seq_len", "global_batch", "precision", "ac", "compile"),
    *("optimizer", "data", "accelerator", "device"),
)
# These follow from the layout, unless the user has set them.
_FOLLOWING = ("microbatch", "schedule")
_LAYOUT = ("layout.label", "world")
# Speeds are compared as ratios, also in a ranking.
SPEEDS = ("tokens_per_second", "tokens_per_second_all", "mfu_percent")
_FIGURES = ("processes", "tokens/s", "of all", "MFU", "GiB", "loss", "validation")


@dataclass(frozen=True)
class RecipeRuns:
    """Runs of one recipe.

    Attributes:
        layout: label of the layout.
        world: number of processes.
        differing: other columns in which the groups of the sweep differ; empty values are None.
        rows: of the runs, one for each repeat.
    """

    layout: str
    world: int
    differing: Mapping[str, Any]
    rows: Sequence[Row]

    @property
    def label(self) -> str:
        """A short name: `dp_s2 · bf16 · microbatch 4`."""
        parts = [
            str(value) if isinstance(value, str) and not name.startswith(POINT) else f"{_short(name)} {_shown(value)}"
            for name, value in self.differing.items()
            if value is not None
        ]
        return " · ".join([self.layout, *parts])

    @property
    def is_control(self) -> bool:
        """Whether these are the runs of the sweep's control."""
        return any(row["control"] for row in self.rows)

    @property
    def is_oversubscribed(self) -> bool:
        """Whether a run had more processes than cores."""
        return any(row["oversubscribed"] for row in self.rows)

    def values(self, column: str) -> list[float]:
        """The values of a column for the runs that are done and have one."""
        return [row[column] for row in self.rows if row["outcome"] == "done" and row[column] is not None]

    def typical(self, column: str) -> float | None:
        """The geometric mean of a speed, and the median of another column, over the runs that are done."""
        known = self.values(column)
        if column in SPEEDS and known and min(known) > 0:
            return statistics.geometric_mean(known)
        return statistics.median(known) if known else None


def groups(rows: Iterable[Row]) -> list[RecipeRuns]:
    """The recipes of a sweep, in the order of their first runs; dropped points are omitted."""
    members_of: dict[tuple[Any, ...], list[Row]] = {}
    shown = [row for row in runs(rows) if row["layout.label"] is not None]
    # Include the swept keys: some, such as a learning rate, have no column of their own.
    others = (*_FOLLOWING, *point_keys(shown))
    names = ("control", *_LAYOUT, *_RECIPE, *others)
    for row in shown:
        key = (bool(row["control"]), *(row[name] for name in names[1:]))
        members_of.setdefault(key, []).append(row)
    keys = [dict(zip(names, values, strict=True)) for values in members_of]
    differing = [name for name in _RECIPE if len({key[name] for key in keys}) > 1]
    differing += _needed(others, keys, (*_LAYOUT, *differing))
    return [
        RecipeRuns(key["layout.label"], key["world"], {name: key[name] for name in differing}, members)
        for key, members in zip(keys, members_of.values(), strict=True)
    ]


def comparison(rows: Iterable[Row]) -> list[str]:
    """Aligned lines: typical figures of the runs that are done, and the outcomes of all. Empty without a run."""
    compared = groups(rows)
    if not compared:
        return []
    headings = ["layout", "processes", *map(_short, compared[0].differing)]
    headings += ["tokens/s", "of all", "MFU", "GiB", "loss", "validation", "outcome"]
    lines = [
        [
            group.layout + (" (control)" if group.is_control else ""),
            str(group.world),
            *map(_shown, group.differing.values()),
            *_figures(group),
        ]
        for group in compared
    ]
    text = aligned(headings, lines, right=_FIGURES)
    return [*text, OVERSUBSCRIBED] if any(group.is_oversubscribed for group in compared) else text


def _needed(names: Sequence[str], keys: Sequence[Row], seen: Sequence[str]) -> list[str]:
    """The columns without which two lines would look the same."""
    needed: list[str] = []
    for name in names:
        distinct = {tuple(key[column] for column in (*seen, *needed)) for key in keys}
        if len(distinct) < len({tuple(key[column] for column in (*seen, *needed, name)) for key in keys}):
            needed.append(name)
    return needed


def _figures(group: RecipeRuns) -> list[str]:
    mark = "*" if group.is_oversubscribed else ""
    forms: dict[str, Callable[[float], str]] = {
        "tokens_per_second": lambda value: grouped(value) + mark,
        "tokens_per_second_all": lambda value: grouped(value) + mark,
        "mfu_percent": lambda value: f"{value:.1f}%",
        "memory_gib": lambda value: f"{value:.2f}",
        "loss": lambda value: f"{value:.4f}",
        "validation_loss": lambda value: f"{value:.4f}",
    }
    figures = {name: group.typical(name) for name in forms}
    texts = ["" if (figure := figures[name]) is None else form(figure) for name, form in forms.items()]
    ends = Counter(map(word, group.rows))
    alone = len(group.rows) == 1
    return [*texts, ", ".join(name if alone else f"{count} {name}" for name, count in ends.items())]


def _short(name: str) -> str:
    return name.removeprefix(POINT)


def _shown(value: object) -> str:
    if value is None:
        return ""
    return grouped(value) if isinstance(value, int) and not isinstance(value, bool) else str(value)


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


COLUMN_OF = {"tps": "tokens_per_second", "mfu": "mfu_percent", "memory": "memory_gib"}
# In the convention of an MFU whose peak is not that of a datasheet: another run has measured another one.
MEASURED_PEAK = "measured on this CPU"
OWN_PEAK = "its MFU is a share of a peak that each run measured by itself; rank by tokens/s (--by tps)"
_OVERSUBSCRIBED = "oversubscribed: more processes than cores, so that its speed says nothing"


@dataclass(frozen=True, kw_only=True)
class RankedRecipe:
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

    group: RecipeRuns
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


def entry_of(group: RecipeRuns, by: str, max_memory_gib: float | None) -> RankedRecipe:
    done = [row for row in group.rows if row["outcome"] == "done"]
    memory = max(_positive(done, "memory_gib"), default=None)
    counted = counted_runs(group, by)
    figures = tuple(_positive(counted, COLUMN_OF[by]))
    return RankedRecipe(
        group=group,
        figures=figures,
        centre=statistics.geometric_mean(figures) if figures else None,
        spread_percent=100 * statistics.stdev(map(math.log, figures)) if len(figures) > 1 else None,
        memory_gib=memory,
        left_out=_reason(group, done, counted, figures, by, memory, max_memory_gib),
    )


def counted_runs(group: RecipeRuns, by: str) -> list[Row]:
    """The runs whose figures count: those that are done, and for a speed had a core for each process."""
    return [row for row in group.rows if row["outcome"] == "done" and (by == "memory" or not row["oversubscribed"])]


def _reason(
    group: RecipeRuns,
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
