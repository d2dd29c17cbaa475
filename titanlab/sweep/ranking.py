"""Ranks the recipes of a sweep by speed, MFU or memory, and says whether the first one is better by more than noise.

One run is one observation: the steps of a run share its processes, its memory and its time of day, so they say little
about another run of the same recipe. The noise of a run is the standard deviation of the logarithms of the figures of
equal recipes, pooled over all recipes that have repeats.

A recipe is named the winner if it is better than *each* other one at a family-wise error of at most 5 %: Student's t
with the pooled degrees of freedom, two-sided, at `ERROR` / (recipes - 1). These are the multiple comparisons with the
best of Edwards and Hsu (Journal of the American Statistical Association 78, 1983), with Bonferroni's inequality in
place of the tables of Dunnett's distribution: recipes may then have different numbers of runs.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from titanlab.sweep.listing import RecipeRuns, Row, groups, runs, state_word
from titanlab.sweep.reconcile import ACTIVE
from titanlab.system import aligned, counted, duration, grouped

# The probability that any of the statements about one sweep is wrong. The promise above is 5 %; the difference is a
# reserve, because noise is not quite normal.
ERROR = 0.04
_DRIFT_ERROR = 0.05
COLUMN_OF = {"tps": "tokens_per_second", "mfu": "mfu_percent", "memory": "memory_gib"}
# Text in `mfu_convention` if the MFU's peak was measured by the run itself: such MFUs cannot be compared.
MEASURED_PEAK = "measured on this CPU"
OWN_PEAK = "its MFU is a share of a peak that each run measured by itself; rank by tokens/s (--by tps)"
_OVERSUBSCRIBED = "oversubscribed: more processes than cores, so that its speed says nothing"
_EMULATED = "emulated: its products are in 32 bits on this device, so that its speed says nothing"
_UNMEASURED = {
    "tps": "its speed was not measured: no step after warm-up",
    "mfu": "has no MFU: the peak of its device is unknown",
    "memory": "its memory was not measured",
}


@dataclass(frozen=True, kw_only=True)
class Change:
    """How many percent better one figure is than another (less memory is better); negative if it is worse.

    Attributes:
        interval_percent: the 95 % interval; None if the noise is unknown.
    """

    percent: float
    interval_percent: tuple[float, float] | None

    @property
    def is_within_noise(self) -> bool | None:
        """Whether the change may be noise only; None if that is unknown."""
        return None if self.interval_percent is None else self.interval_percent[0] <= 0 <= self.interval_percent[1]


@dataclass(frozen=True, kw_only=True)
class Drift(Change):
    """The change of the control's figure between the starts of its first and its last run, on a fitted straight line.

    Attributes:
        seconds: the time between these two starts.
    """

    runs: int
    seconds: float

    def to_mapping(self) -> dict[str, Any]:
        return {**asdict(self), "is_within_noise": self.is_within_noise}


@dataclass(frozen=True, kw_only=True)
class RankedRecipe:
    """A recipe in a ranking.

    Attributes:
        figures: one for each run that counts.
        low, high: the ends of the 95 % interval around `centre`; None if the noise is unknown.
        spread_percent: relative standard deviation of its own figures; None with fewer than two.
        memory_gib: the most that a run of the recipe needed; None if unknown.
        is_within_noise: whether the recipe may be as good as the first one; True for the first one; None: unknown.
        left_out: why the recipe has no place in the ranking; None: it has one.
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
    def label(self) -> str:
        return self.group.label

    @property
    def stack_step(self) -> int | None:
        return self.group.rows[0].get("stack_step")

    @property
    def ends(self) -> dict[str, int]:
        """The number of its runs by outcome; by state if they have not ended."""
        return dict(Counter(map(state_word, self.group.rows)))

    def to_mapping(self) -> dict[str, Any]:
        own = {name: value for name, value in vars(self).items() if name not in ("group", "low", "high")}
        return {
            **own,
            "recipe": self.label,
            "layout": self.group.layout,
            "world": self.group.world,
            "differing": dict(self.group.differing),
            "is_control": self.group.is_control,
            "runs": [row["run"] for row in self.group.rows],
            "ends": self.ends,
            "interval": None if self.low is None else [self.low, self.high],
        }


@dataclass(frozen=True, kw_only=True)
class StackStep(Change):
    """The gain of a stack's step (see space.py) over the ranked step before; the intervals hold for all steps together.

    Attributes:
        by: what the recipes are ranked by.
    """

    by: str
    entry: RankedRecipe
    before: RankedRecipe

    @property
    def is_next(self) -> bool:
        """Whether the two steps are neighbours in the stack: no step between them failed or was left out."""
        return self.entry.stack_step == (self.before.stack_step or 0) + 1

    @property
    def name(self) -> str:
        """The step's label, and the label of the step it is compared with if that is not its neighbour."""
        return self.entry.label if self.is_next else f"{self.entry.label} over {self.before.label}"

    @property
    def is_worse(self) -> bool:
        """Whether the step makes the figure worse by more than noise."""
        return self.interval_percent is not None and self.interval_percent[1] < 0

    @property
    def gain_text(self) -> str:
        """`+12.3% (95% interval 10.1% to 14.6%)`: how the figure changes, so that more memory is `+` too."""
        sign = -1 if self.by == "memory" else 1
        text = f"{'+' if sign * self.percent >= 0 else ''}{percent(sign * self.percent)}"
        if self.interval_percent is not None:
            text += f" ({_interval(sorted(sign * end for end in self.interval_percent))})"
        return text + (", within noise" if self.is_within_noise else "")

    def to_mapping(self) -> dict[str, Any]:
        return {
            "recipe": self.entry.label,
            "before": self.before.label,
            "gain_percent": self.percent,
            "interval_percent": self.interval_percent,
            "is_within_noise": self.is_within_noise,
        }


@dataclass(frozen=True, kw_only=True)
class SweepRanking:
    """The recipes of a sweep, best first.

    Attributes:
        by: `tps`, `mfu` or `memory`; the least memory is the best.
        max_memory_gib: recipes that need more are left out; None: no limit.
        ranked: the recipes that have a place, in their order.
        left_out: the other recipes.
        gap: the lead of the first over the second; its interval is valid for the comparisons with all others together.
            None: there is nothing to compare.
        noise_percent: relative standard deviation of a run, pooled over the recipes with repeats; None without any.
        control: the runs of the sweep's control, which gets no place; None: there is no control, or no run of it is
            done.
        control_gap: the lead of the first over the control, as a single comparison.
        control_left_out: why the control has no figure; None: it has one, or the sweep has no control.
        drift: the change of the control's figure during the sweep; None unless two of its runs are done.
        steps: the gain of each ranked step of a stack after the first, in order; empty: the sweep is not a stack.
    """

    by: str
    max_memory_gib: float | None
    ranked: tuple[RankedRecipe, ...]
    left_out: tuple[RankedRecipe, ...]
    gap: Change | None
    noise_percent: float | None
    degrees: int
    control: RankedRecipe | None
    control_gap: Change | None
    control_left_out: str | None
    drift: Drift | None
    steps: tuple[StackStep, ...]

    @property
    def entries(self) -> tuple[RankedRecipe, ...]:
        return self.ranked + self.left_out

    @property
    def first(self) -> RankedRecipe | None:
        """The entry with the best figure, whether or not it can be named the winner."""
        return next(iter(self.ranked), None)

    @property
    def winner(self) -> RankedRecipe | None:
        """The first, if it is better than every other by more than noise; None: no winner can be named."""
        others = self.ranked[1:]
        return self.ranked[0] if others and all(entry.is_within_noise is False for entry in others) else None

    @property
    def is_within_noise(self) -> bool | None:
        """Whether noise is why no winner can be named; None: the noise is unknown, or there is nothing to compare."""
        return None if self.gap is None or self.gap.interval_percent is None else self.winner is None

    def to_mapping(self) -> dict[str, Any]:
        gap, control_gap = self.gap, self.control_gap
        return {
            "by": self.by,
            "max_memory_gib": self.max_memory_gib,
            "sentence": sentence_of(self),
            "notes": notes_of(self),
            "winner": None if self.winner is None else self.winner.label,
            "runner_up": self.ranked[1].label if len(self.ranked) > 1 else None,
            "gap_percent": gap and gap.percent,
            "interval_percent": gap and gap.interval_percent,
            "is_within_noise": self.is_within_noise,
            "noise_percent": self.noise_percent,
            "degrees_of_freedom": self.degrees,
            "control": self.control and self.control.to_mapping(),
            "control_gap_percent": control_gap and control_gap.percent,
            "control_interval_percent": control_gap and control_gap.interval_percent,
            "control_left_out": self.control_left_out,
            "drift": self.drift and self.drift.to_mapping(),
            "steps": [step.to_mapping() for step in self.steps],
            "recipes": [entry.to_mapping() for entry in self.entries],
        }


def _entry(group: RecipeRuns, by: str, max_memory_gib: float | None) -> RankedRecipe:
    """The entry of a recipe that is not ranked yet; `left_out` is the reason if it cannot be ranked."""
    done = [row for row in group.rows if row["outcome"] == "done"]
    memory = max(_positive(done, "memory_gib"), default=None)
    counting = _counting(group, by)
    figures = _positive(counting, COLUMN_OF[by])
    reason = None
    if not done:
        reason = f"no run is done: {_counts(Counter(map(state_word, group.rows)))}"
    elif max_memory_gib is not None and memory is None:
        reason = "its memory is unknown, so it cannot be compared with the limit"
    elif max_memory_gib is not None and memory is not None and memory > max_memory_gib:
        reason = f"needs {memory:.2f} GiB, more than {max_memory_gib:g}"
    elif not counting:
        reason = _OVERSUBSCRIBED if group.is_oversubscribed else _EMULATED
    elif by == "mfu" and any(MEASURED_PEAK in (row["mfu_convention"] or "") for row in counting):
        reason = OWN_PEAK
    elif not figures:
        reason = _UNMEASURED[by]
    return RankedRecipe(
        group=group,
        figures=tuple(figures),
        centre=statistics.geometric_mean(figures) if figures else None,
        spread_percent=100 * statistics.stdev(map(math.log, figures)) if len(figures) > 1 else None,
        memory_gib=memory,
        left_out=reason,
    )


def _counting(group: RecipeRuns, by: str) -> list[Row]:
    """The runs that are done; for a speed, those that had a core for each process and did not emulate products."""
    done = [row for row in group.rows if row["outcome"] == "done"]
    return [row for row in done if by == "memory" or not (row["oversubscribed"] or row.get("emulated"))]


def _positive(rows: Sequence[Row], column: str) -> list[float]:
    """The figures of a column that can be compared as ratios: those that are finite and above 0."""
    known = (row[column] for row in rows)
    return [value for value in known if value is not None and math.isfinite(value) and value > 0]


def drift_of(rows: Sequence[Row], column: str, *, squares: float = 0.0, degrees: int = 0) -> Drift | None:
    """The drift of the control's runs in a column; None unless two of them have a figure, at different times.

    The noise of the recipes' repeats counts too: `squares` sums their squared log residuals, with `degrees` of freedom.
    """
    started = [row for row in rows if row["started"] is not None and _positive([row], column)]
    moments = [row["started"] for row in started]
    first, last = min(moments, default=0.0), max(moments, default=0.0)
    if last <= first:
        return None
    # Scale times: 0 is the control's first run, 1 its last run. The slope is then the total change.
    times = [(time - first) / (last - first) for time in moments]
    values = [math.log(row[column]) for row in started]
    slope, start = statistics.linear_regression(times, values)
    interval = None
    degrees += len(values) - 2
    if degrees:
        squares += math.fsum((value - start - slope * time) ** 2 for time, value in zip(times, values, strict=True))
        deviation = math.sqrt(squares / degrees / (len(times) * statistics.pvariance(times)))
        half = _t_quantile(degrees, _DRIFT_ERROR) * deviation
        interval = (_percent(slope - half, 1), _percent(slope + half, 1))
    return Drift(percent=_percent(slope, 1), interval_percent=interval, runs=len(values), seconds=last - first)


def _t_quantile(degrees: int, error: float) -> float:
    """The t of Student's distribution for which P(|x| > t) = `error`."""
    # Imported here: only a ranking with repeats needs it.
    from scipy.special import stdtrit

    return float(stdtrit(degrees, 1 - error / 2))


def rank(rows: Iterable[Row], *, by: str = "tps", max_memory_gib: float | None = None) -> SweepRanking:
    """Rank the recipes of a sweep's rows.

    Args:
        by: `tps` (tokens per second of one device), `mfu` or `memory`.
        max_memory_gib: leave out recipes with a run that needed more, or whose memory is unknown.

    Raises:
        KeyError: `by` is none of these.
    """
    everything = [_entry(group, by, max_memory_gib) for group in groups(rows)]
    noise, degrees = _pooled(everything)
    sign = -1 if by == "memory" else 1

    def placed(entry: RankedRecipe, *, near: bool | None = None) -> RankedRecipe:
        """The entry with the interval around its own centre."""
        if noise is None or entry.centre is None:
            return replace(entry, is_within_noise=near)
        half = _t_quantile(degrees, ERROR) * noise / math.sqrt(entry.runs)
        low, high = entry.centre * _exp(-half), entry.centre * _exp(half)
        return replace(entry, is_within_noise=near, low=low, high=high)

    def lead(first: RankedRecipe, other: RankedRecipe, comparisons: int) -> Change:
        """The lead of a recipe over another one."""
        lead = sign * (math.log(first.centre or 1) - math.log(other.centre or 1))
        if noise is None:
            return Change(percent=_percent(lead, sign), interval_percent=None)
        error = noise * math.sqrt(1 / first.runs + 1 / other.runs)
        half = _t_quantile(degrees, ERROR / comparisons) * error
        interval = (_percent(lead - half, sign), _percent(lead + half, sign))
        return Change(percent=_percent(lead, sign), interval_percent=interval)

    entries = [entry for entry in everything if not entry.group.is_control]
    ranked = [entry for entry in entries if entry.left_out is None]
    ranked.sort(key=lambda entry: (-sign * (entry.centre or 0.0), entry.label))
    stacked = sorted(
        (entry for entry in ranked if entry.stack_step is not None), key=lambda entry: entry.stack_step or 0
    )
    # All comparisons share one error: the first with each other recipe, and each step with the step before it.
    comparisons = len(ranked) - 1 + max(0, len(stacked) - 1)
    leads = [lead(ranked[0], other, comparisons) for other in ranked[1:]]
    within = [None if noise is None else True, *(lead.is_within_noise for lead in leads)]
    controls = [entry for entry in everything if entry.group.is_control]
    control = max((entry for entry in controls if entry.figures), key=lambda entry: entry.runs, default=None)
    drift = None
    if control is not None:
        # The noise of all recipes but the control: its standard deviation, and the degrees of freedom.
        others, free = _pooled(entries)
        squares = (others or 0.0) ** 2 * free
        drift = drift_of(_counting(control.group, by), COLUMN_OF[by], squares=squares, degrees=free)
    return SweepRanking(
        by=by,
        max_memory_gib=max_memory_gib,
        ranked=tuple(placed(entry, near=near) for entry, near in zip(ranked, within, strict=bool(ranked))),
        left_out=tuple(entry for entry in entries if entry.left_out is not None),
        gap=next(iter(leads), None),
        noise_percent=None if noise is None else 100 * noise,
        degrees=degrees,
        control=control and placed(control),
        control_gap=lead(ranked[0], control, 1) if control is not None and ranked else None,
        control_left_out=None if control else next((entry.left_out for entry in controls), None),
        drift=drift,
        steps=tuple(
            StackStep(by=by, entry=entry, before=before, **vars(lead(entry, before, comparisons)))
            for before, entry in itertools.pairwise(stacked)
        ),
    )


def drift_lines(rows: Sequence[Row]) -> list[str]:
    """The drift of the sweep's control in tokens/s, for the lines below a table; empty without a control."""
    drift = rank(rows).drift if any(row["control"] for row in rows) else None
    return [] if drift is None else [drift_line(drift, "tps")]


def _pooled(entries: Sequence[RankedRecipe]) -> tuple[float | None, int]:
    """The standard deviation of the logarithm of a run's figure, pooled over all repeats, and its degrees of freedom.

    Recipes above the memory limit count too: their repeats show the noise as well as those of other recipes.
    """
    samples = [list(map(math.log, entry.figures)) for entry in entries if entry.runs > 1]
    degrees = sum(len(sample) - 1 for sample in samples)
    squares = math.fsum(statistics.variance(sample) * (len(sample) - 1) for sample in samples)
    return (math.sqrt(squares / degrees) if degrees else None), degrees


def _percent(lead: float, sign: int) -> float:
    """A logarithmic lead in percent: how much more than the other recipe, or for memory how much less."""
    return 100 * (_exp(lead) - 1) if sign > 0 else 100 * (1 - _exp(-lead))


def _exp(value: float) -> float:
    """The exponential; infinite if it exceeds a float, as for two runs with large noise."""
    return math.inf if value > 700 else math.exp(value)


HEADINGS = ("", "recipe", "processes", "runs", "tokens/s", "MFU", "GiB", "95% interval", "spread", "against the first")
_FIGURES = ("", "processes", "runs", "tokens/s", "MFU", "GiB", "spread")
_NOUNS = {"tps": "tokens/s per device", "mfu": "MFU", "memory": "memory"}
_BEST = {"tps": "is the fastest", "mfu": "has the highest MFU", "memory": "needs the least memory"}
_WAS_BEST = {"tps": "was the fastest", "mfu": "had the highest MFU", "memory": "needed the least memory"}
_PENDING = (*ACTIVE, "queued", "prepared")


def amount(value: float | None, by: str) -> str:
    """A figure with its unit: `1,234 tokens/s per device`, `41.5% MFU`, `0.75 GiB`."""
    return f"{figure(value, by)} {'GiB' if by == 'memory' else _NOUNS[by]}"


def figure(value: float | None, by: str) -> str:
    """A figure without its unit; only a percent sign stays."""
    if value is None:
        return ""
    if by == "tps":
        return grouped(value) if value >= 100 else f"{value:.3g}"
    return f"{value:.1f}%" if by == "mfu" else f"{value:.2f}"


def percent(value: float) -> str:
    """A change in percent: `12.3%`, `0.05%`, `-3.0%`."""
    if value >= 1000:
        return "over 1,000%"
    # `.1f` would round small gaps, such as those of memory, to zero.
    return f"{value:.1f}%" if abs(value) >= 0.095 else f"{value:.1g}%"


def _interval(ends: Sequence[float]) -> str:
    return "95% interval {} to {}".format(*map(percent, ends))


def sentence_of(ranking: SweepRanking) -> str:
    """The answer in one sentence: the best recipe and its lead, or why none can be named; and steps that are worse."""
    losses = [f"{step.name} {step.gain_text}" for step in ranking.steps if step.is_worse]
    end = f"; worse than the step before: {', '.join(losses)}" if losses else ""
    return f"{_answer(ranking)}{end}."


def _answer(ranking: SweepRanking) -> str:
    by, first, gap = ranking.by, ranking.first, ranking.gap
    if first is None:
        return _nothing(ranking)
    best = f"{first.label} ({amount(first.centre, by)})"
    if gap is None:
        return f"Only {best} can be ranked: there is nothing to compare it with"
    second, lead = ranking.ranked[1], percent(gap.percent)
    more = f"{lead} {'less' if by == 'memory' else 'more'} than {second.label}"
    if gap.interval_percent is None:
        return (
            f"No winner can be named: {first.label} {_WAS_BEST[by]} ({amount(first.centre, by)}, {more}), but no "
            "recipe was run twice, so that the noise is unknown"
        )
    interval = f"({_interval(gap.interval_percent)})"
    if ranking.winner is not None:
        return f"{first.label} {_BEST[by]}: {amount(first.centre, by)}, {more} {interval}"
    equal = sum(entry.centre == first.centre for entry in ranking.ranked)
    if equal > 1:
        others = second.label if equal == 2 else counted(equal - 1, "other recipe")
        return f"No winner can be named: {first.label} and {others} are level at {amount(first.centre, by)}"
    total, near = len(ranking.ranked), sum(entry.is_within_noise is True for entry in ranking.ranked)
    if total == 2:
        other = f"{second.label} ({figure(second.centre, by)})"
        return f"No winner can be named: {best} and {other} are within noise; the gap is {lead} {interval}"
    which = f"all {near}" if near == total else f"{near} of {total}"
    return (
        f"No winner can be named: {which} recipes are within noise of the best figure, that of {best}; its lead over "
        f"{second.label} is {lead} {interval}"
    )


def _nothing(ranking: SweepRanking) -> str:
    """Why no recipe has a place in the ranking."""
    by, entries, limit = ranking.by, ranking.left_out, ranking.max_memory_gib
    if not entries:
        return "There is nothing to rank: the sweep has no run"
    rows = runs(row for entry in entries for row in entry.group.rows)
    if not any(row["outcome"] == "done" for row in rows):
        return f"There is nothing to rank: none of {counted(len(rows), 'run')} is done"
    needs = [entry.memory_gib for entry in entries if entry.memory_gib is not None]
    if limit is not None and needs and min(needs) > limit:
        return f"No recipe fits into {limit:g} GiB: the smallest needs {min(needs):.2f}"
    reason = entries[0].left_out
    if by == "mfu" and any(entry.left_out == OWN_PEAK for entry in entries):
        reason = OWN_PEAK
    elif by != "memory" and any(entry.group.is_oversubscribed for entry in entries):
        reason = (
            "the runs had more processes than cores, so that their speed says nothing; rank them by memory "
            "(--by memory)"
        )
    return f"No recipe can be ranked by {_NOUNS[by]}: {reason}"


def notes_of(ranking: SweepRanking) -> list[str]:
    """What a reader must know to judge the answer: the noise, the drift, and missing runs."""
    notes, by = [], ranking.by
    if ranking.ranked and ranking.noise_percent is None:
        notes.append("Noise: unknown, as no recipe has two runs; hydra.sweeper.repeats=3 runs each three times.")
    elif ranking.ranked and ranking.noise_percent is not None:
        controls = [] if ranking.control is None else [ranking.control]
        repeated = [entry for entry in (*ranking.entries, *controls) if entry.runs > 1]
        notes.append(
            f"Noise: a run differs by {percent(ranking.noise_percent)} (standard deviation, pooled over the repeats of "
            f"{counted(len(repeated), 'recipe')}; {counted(ranking.degrees, 'degree')} of freedom)."
        )
    if ranking.control is not None:
        notes.append(_control_line(ranking, ranking.control))
    elif ranking.control_left_out is not None:
        notes.append(f"Control: {ranking.control_left_out}. So nothing is known of a drift of the machine.")
    if ranking.drift is not None:
        notes.append(drift_line(ranking.drift, by))
    if by == "tps":
        notes += _unfair(ranking)
    pending, failed = Counter[str](), Counter[str]()
    for entry in ranking.entries:
        pending.update({end: count for end, count in entry.ends.items() if end in _PENDING})
    for entry in ranking.ranked:
        failed.update({end: count for end, count in entry.ends.items() if end not in (*_PENDING, "done")})
    if failed:
        notes.append(f"Ranked recipes have runs that failed: {_counts(failed)}.")
    if pending:
        notes.append(f"The sweep has not ended ({_counts(pending)}): the answer may change.")
    return notes


def _control_line(ranking: SweepRanking, control: RankedRecipe) -> str:
    by, gap = ranking.by, ranking.control_gap
    line = f"Control: {control.label}, {amount(control.centre, by)} ({counted(control.runs, 'run')})"
    if ranking.first is not None and gap is not None:
        word = "less" if (by == "memory") == (gap.percent >= 0) else "more"
        line += f"; {ranking.first.label} {'needs' if by == 'memory' else 'does'} {percent(abs(gap.percent))} {word}"
        if gap.interval_percent is not None:
            low, high = gap.interval_percent
            ends = (low, high) if gap.percent >= 0 else (-high, -low)
            line += f" ({_interval(ends)}), {'within noise' if gap.is_within_noise else 'more than noise'}"
    return f"{line}."


def _unfair(ranking: SweepRanking) -> list[str]:
    """Notes for the reader if the recipes' tokens/s cannot be compared directly."""
    notes = []
    if len({entry.group.world for entry in ranking.ranked}) > 1:
        whole = {entry.label: (entry.centre or 0.0) * entry.group.world for entry in ranking.ranked}
        most = max(whole, key=lambda label: whole[label])
        notes.append(
            "The recipes have different numbers of processes: tokens/s are those of one device. Of all devices "
            f"together {most} has the most: {figure(whole[most], 'tps')} tokens/s."
        )
    sizes = {tuple(entry.group.rows[0][name] for name in ("model", "layers", "dim")) for entry in ranking.ranked}
    peaks = {row["mfu_convention"] or "" for entry in ranking.ranked for row in entry.group.rows}
    if len(sizes) > 1 and not any(MEASURED_PEAK in peak for peak in peaks):
        notes.append("The recipes have different models: compare them by MFU (--by mfu).")
    return notes


def drift_line(drift: Drift, by: str) -> str:
    """The control's drift: how far its figure moved during the sweep, and whether that is more than noise."""
    moved = f"{abs(drift.percent):.1f}% {'up' if drift.percent >= 0 else 'down'}"
    line = f"Drift: the control's {_NOUNS[by]} went {moved} in {duration(drift.seconds)} ({counted(drift.runs, 'run')}"
    if drift.interval_percent is None:
        return f"{line}); whether that is noise is unknown."
    end = "within noise" if drift.is_within_noise else "more than noise: the machine changed while the sweep ran"
    return f"{line}, {_interval(drift.interval_percent)}): {end}."


def ranking_lines(ranking: SweepRanking) -> list[str]:
    """The whole answer: the sentence, the ranked table, the notes, and which recipes are left out and why."""
    lines = [sentence_of(ranking)]
    if ranking.ranked:
        cells = [_cells(place, entry, ranking.by, ranking.ranked[0]) for place, entry in enumerate(ranking.ranked, 1)]
        lines += [f"  {line}" for line in aligned(HEADINGS, cells, right=_FIGURES)]
    if ranking.steps:
        lines.append(f"Steps, each against the one before it, from {ranking.steps[0].before.label}:")
        lines += [f"  {step.name}: {step.gain_text}" for step in ranking.steps]
    lines += notes_of(ranking)
    if ranking.left_out:
        lines.append(f"left out: {counted(len(ranking.left_out), 'recipe')}")
        lines += [f"  {entry.label}: {entry.left_out}" for entry in ranking.left_out]
    return lines


def _cells(place: int, entry: RankedRecipe, by: str, first: RankedRecipe) -> tuple[str, ...]:
    group, total = entry.group, len(entry.group.rows)
    shown = {"memory": figure(entry.memory_gib, "memory")}
    for name in ("tps", "mfu"):
        value = group.typical(COLUMN_OF[name])
        shown[name] = figure(value, name) + ("*" if value is not None and group.is_oversubscribed else "")
    shown[by] = figure(entry.centre, by)
    against = f"{100 * ((entry.centre or 0) / (first.centre or 1) - 1):+.1f}%"
    return (
        str(place),
        entry.label,
        str(group.world),
        str(entry.runs) if entry.runs == total else f"{entry.runs} of {total}",
        *(shown[name] for name in ("tps", "mfu", "memory")),
        "" if entry.low is None else f"{figure(entry.low, by)} to {figure(entry.high, by)}",
        "" if entry.spread_percent is None else percent(entry.spread_percent),
        "" if place == 1 else against + (", within noise" if entry.is_within_noise else ""),
    )


def _counts(ends: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in ends.items())
