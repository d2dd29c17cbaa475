"""A ranking in words: the answer as one sentence, what limits it, and the ranked table."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from titanlab.sweep.table.listing import ACTIVE, aligned, runs
from titanlab.sweep.table.ranking_entry import MEASURED_PEAK, OWN_PEAK
from titanlab.terminal.numerals import counted, duration, grouped

if TYPE_CHECKING:
    from titanlab.sweep.table.drift import Drift
    from titanlab.sweep.table.ranking import Ranking
    from titanlab.sweep.table.ranking_entry import Entry

HEADINGS = ("", "recipe", "processes", "runs", "tokens/s", "MFU", "GiB", "95% interval", "spread", "against the first")
_FIGURES = ("", "processes", "runs", "tokens/s", "MFU", "GiB", "spread")
_NOUNS = {"tps": "tokens/s per device", "mfu": "MFU", "memory": "memory"}
_BEST = {"tps": "is the fastest", "mfu": "has the highest MFU", "memory": "needs the least memory"}
_WAS_BEST = {"tps": "was the fastest", "mfu": "had the highest MFU", "memory": "needed the least memory"}
_PENDING = (*ACTIVE, "queued", "prepared")


def amount(value: float | None, by: str) -> str:
    """A figure with its unit: `1,234 tokens/s per device`, `41.5% MFU`, `0.75 GiB`."""
    return {"tps": "{} tokens/s per device", "mfu": "{} MFU", "memory": "{} GiB"}[by].format(figure(value, by))


def figure(value: float | None, by: str) -> str:
    """A figure without its unit; only a percent sign stays."""
    if value is None:
        return ""
    if by == "tps":
        return grouped(value) if value >= 100 else f"{value:.3g}"
    return f"{value:.1f}%" if by == "mfu" else f"{value:.2f}"


def percent(value: float) -> str:
    """A change in percent: `12.3%`, `0.05%`, `-3.0%`."""
    if math.isinf(value) or value >= 1000:
        return "over 1,000%"
    # More digits for the small gaps of memory; none would be left of them otherwise.
    return f"{value:.1f}%" if abs(value) >= 0.095 else f"{value:.1g}%"


def sentence_of(ranking: Ranking) -> str:
    """The answer in one sentence: who is the best and by how much, or why nobody can be named."""
    by, first, second = ranking.by, ranking.first, ranking.runner_up
    if first is None:
        return _nothing(ranking)
    if second is None:
        return f"Only {first.label} ({amount(first.centre, by)}) can be ranked: there is nothing to compare it with."
    lead = percent(ranking.gap_percent or 0.0)
    best = f"{first.label} ({amount(first.centre, by)})"
    gap = f"{lead} {'less' if by == 'memory' else 'more'} than {second.label}"
    if ranking.interval_percent is None:
        return (
            f"No winner can be named: {first.label} {_WAS_BEST[by]} ({amount(first.centre, by)}, {gap}), but no recipe "
            "was run twice, so that the noise is unknown."
        )
    interval = "(95% interval {} to {})".format(*map(percent, ranking.interval_percent))
    if ranking.winner is not None:
        return f"{first.label} {_BEST[by]}: {amount(first.centre, by)}, {gap} {interval}."
    ranked = ranking.ranked
    equal = sum(entry.centre == first.centre for entry in ranked)
    if equal > 1:
        others = second.label if equal == 2 else counted(equal - 1, "other recipe")
        return f"No winner can be named: {first.label} and {others} are level at {amount(first.centre, by)}."
    near = sum(entry.is_within_noise is True for entry in ranked)
    if near == 2 and len(ranked) == 2:
        other = f"{second.label} ({figure(second.centre, by)})"
        return f"No winner can be named: {best} and {other} are within noise; the gap is {lead} {interval}."
    which = f"all {near}" if near == len(ranked) else f"{near} of {len(ranked)}"
    return (
        f"No winner can be named: {which} recipes are within noise of the best figure, that of {best}; its lead over "
        f"{second.label} is {lead} {interval}."
    )


def notes_of(ranking: Ranking) -> list[str]:
    """What else one has to know to believe the answer: the noise, the drift, and what is missing."""
    notes = [_noise(ranking)] if ranking.ranked else []
    if ranking.control is not None:
        notes.append(_control(ranking.control, ranking))
    if ranking.drift is not None:
        notes.append(drift_line(ranking.drift, ranking.by))
    worlds = {entry.group.world for entry in ranking.ranked}
    if ranking.by == "tps" and len(worlds) > 1:
        whole = {entry.label: (entry.centre or 0.0) * entry.group.world for entry in ranking.ranked}
        most = max(whole, key=lambda label: whole[label])
        notes.append(
            "The recipes have different numbers of processes: tokens/s are those of one device. Of all devices "
            f"together {most} has the most: {figure(whole[most], 'tps')} tokens/s."
        )
    sizes = {tuple(entry.group.rows[0][name] for name in ("model", "layers", "dim")) for entry in ranking.ranked}
    peaks = {row["mfu_convention"] or "" for entry in ranking.ranked for row in entry.group.rows}
    if ranking.by == "tps" and len(sizes) > 1 and not any(MEASURED_PEAK in peak for peak in peaks):
        notes.append("The recipes have different models: compare them by MFU (--by mfu).")
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


def drift_line(drift: Drift, by: str) -> str:
    """What the control says: how far its figure moved during the sweep, and whether that is more than noise."""
    moved = f"{abs(drift.percent):.1f}% {'up' if drift.percent >= 0 else 'down'}"
    line = f"Drift: the control's {_NOUNS[by]} went {moved} in {duration(drift.seconds)} ({counted(drift.runs, 'run')}"
    if drift.interval_percent is None:
        return f"{line}); whether that is noise is unknown."
    low, high = map(percent, drift.interval_percent)
    end = "within noise" if drift.is_within_noise else "more than noise: the machine changed while the sweep ran"
    return f"{line}, 95% interval {low} to {high}): {end}."


def ranking_lines(ranking: Ranking) -> list[str]:
    """The whole answer: the sentence, the ranked table, the notes, and who is left out and why."""
    lines = [ranking.sentence]
    if ranking.ranked:
        cells = [_cells(place, entry, ranking) for place, entry in enumerate(ranking.ranked, 1)]
        lines += [f"  {line}" for line in aligned(HEADINGS, cells, right=_FIGURES)]
    lines += ranking.notes
    if ranking.left_out:
        lines.append(f"left out: {counted(len(ranking.left_out), 'recipe')}")
        lines += [f"  {entry.label}: {entry.left_out}" for entry in ranking.left_out]
    return lines


def _cells(place: int, entry: Entry, ranking: Ranking) -> tuple[str, ...]:
    group, by = entry.group, ranking.by
    shown = {name: _other(entry, name) for name in ("tps", "mfu", "memory")}
    shown[by] = figure(entry.centre, by)
    total = len(group.rows)
    return (
        str(place),
        entry.label,
        str(group.world),
        str(entry.runs) if entry.runs == total else f"{entry.runs} of {total}",
        *shown.values(),
        "" if entry.low is None else f"{figure(entry.low, by)} to {figure(entry.high, by)}",
        "" if entry.spread_percent is None else percent(entry.spread_percent),
        _standing(place, entry, ranking),
    )


def _other(entry: Entry, by: str) -> str:
    """A figure by which the recipes are not ranked; speeds of oversubscribed runs are marked."""
    if by == "memory":
        return figure(entry.memory_gib, by)
    value = entry.group.typical({"tps": "tokens_per_second", "mfu": "mfu_percent"}[by])
    return figure(value, by) + ("*" if value is not None and entry.group.is_oversubscribed else "")


def _standing(place: int, entry: Entry, ranking: Ranking) -> str:
    """How a recipe compares with the first one."""
    first = ranking.first
    if place == 1 or first is None or first.centre is None or entry.centre is None:
        return ""
    change = 100 * (entry.centre / first.centre - 1)
    text = f"{change:+.1f}%"
    return f"{text}, within noise" if entry.is_within_noise else text


def _noise(ranking: Ranking) -> str:
    if ranking.noise_percent is None:
        return "Noise: unknown, as no recipe has two runs; hydra.sweeper.repeats=3 runs each three times."
    return (
        f"Noise: a run differs by {percent(ranking.noise_percent)} (standard deviation, pooled over the repeats of "
        f"{counted(len(_repeated(ranking)), 'recipe')}; {counted(ranking.degrees, 'degree')} of freedom)."
    )


def _control(control: Entry, ranking: Ranking) -> str:
    """What the control did, and how the first recipe compares with it."""
    by, first = ranking.by, ranking.first
    line = f"Control: {control.label}, {amount(control.centre, by)} ({counted(control.runs, 'run')})"
    if first is None or ranking.control_gap_percent is None:
        return f"{line}."
    gap = f"{percent(ranking.control_gap_percent)} {'less' if by == 'memory' else 'more'}"
    line = f"{line}; {first.label} {'needs' if by == 'memory' else 'does'} {gap}"
    if ranking.control_interval_percent is None:
        return f"{line}."
    low, high = ranking.control_interval_percent
    end = "within noise" if low <= 0 <= high else "more than noise"
    return f"{line} (95% interval {percent(low)} to {percent(high)}), {end}."


def _repeated(ranking: Ranking) -> list[Entry]:
    control = [] if ranking.control is None else [ranking.control]
    return [entry for entry in (*ranking.entries, *control) if entry.runs > 1]


def _nothing(ranking: Ranking) -> str:
    """Why no recipe has a place."""
    entries = ranking.entries
    if not entries:
        return "There is nothing to rank: the sweep has no run."
    rows = runs(row for entry in entries for row in entry.group.rows)
    if not any(row["outcome"] == "done" for row in rows):
        return f"There is nothing to rank: none of {counted(len(rows), 'run')} is done."
    limit = ranking.max_memory_gib
    needs = [entry.memory_gib for entry in entries if entry.memory_gib is not None]
    if limit is not None and needs and min(needs) > limit:
        return f"No recipe fits into {limit:g} GiB: the smallest needs {min(needs):.2f}."
    oversubscribed = any(entry.group.is_oversubscribed for entry in entries)
    if ranking.by == "mfu" and any(entry.left_out == OWN_PEAK for entry in entries):
        return f"No recipe can be ranked by MFU: {OWN_PEAK}."
    if ranking.by != "memory" and oversubscribed:
        return (
            f"No recipe can be ranked by {_NOUNS[ranking.by]}: the runs had more processes than cores, so that their "
            "speed says nothing; rank them by memory (--by memory)."
        )
    return f"No recipe can be ranked by {_NOUNS[ranking.by]}: {entries[0].left_out}."


def _counts(ends: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in ends.items())
