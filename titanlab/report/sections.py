"""The sections of a report, in the page's order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titanlab.errors import TitanlabError
from titanlab.prove import PARITY_FILE, read_parity
from titanlab.records import OutcomeKind, redact
from titanlab.report import panels
from titanlab.report.facts import Answer, Facts, command_line, differences, representative, sources
from titanlab.report.panels import Cell, PageTable, Panel, run_cell, speed_text, text
from titanlab.sweep import failure_text, state_tone, state_word
from titanlab.system import counted

_MOST_CAUSE = 300
_MOST_TRACEBACKS, _MOST_TRACEBACK = 12, 4_000
_MOST_KEYS = 20
_MOST_SOURCES = 4


@dataclass(frozen=True, kw_only=True)
class Section:
    """One section.

    Attributes:
        details: texts that are shown on demand, by their summary.
    """

    id: str
    title: str
    texts: Sequence[str] = field(default=())
    command: str = ""
    panel: Panel | None = None
    tables: Sequence[PageTable] = field(default=())
    details: Sequence[tuple[str, str]] = field(default=())


def sections_of(facts: Facts, answer: Answer, figures: Mapping[str, Panel]) -> list[Section]:
    """All sections; the ones without a content say why."""
    notes = Counter(str(row["estimate.note"]) for row in facts.runs if row.get("estimate.note"))
    why = "".join(f" Without an estimate: {note}." for note, _ in notes.most_common(1))
    # Title and text of a figure that a report may lack. Only models with experts have a section for these.
    lacking = {
        "step-time": ("Where the time of a step goes", "Neither measured nor estimated for any recipe."),
        "timeline": ("Pipeline timelines", "No recipe has a pipeline that can be drawn."),
        "estimate": (
            "Estimate against measurement",
            f"No run that is done has both an estimate and a measurement.{why}",
        ),
    }
    sections = []
    for name in ("pareto", "throughput", "step-time", "loss", "experts", "timeline", "estimate"):
        if (panel := figures.get(name)) is not None:
            tables = [_recipes(facts, answer)] if name == "throughput" else []
            sections.append(Section(id=name, title=panel.title, panel=panel, tables=tables))
        elif name in lacking:
            title, text_of_it = lacking[name]
            sections.append(Section(id=name, title=title, texts=[text_of_it]))
    sections += [_differences(facts, answer), _dropped(facts), _failures(facts)]
    return [*sections, *_parity(facts.sweep.path), _provenance(facts)]


def panels_of(facts: Facts, answer: Answer, *, by: str) -> dict[str, Panel]:
    """The figures of a report by their names; those for which there is nothing to draw are left out."""
    has_mfu = any(row["mfu_percent"] is not None for row in facts.done)
    speed = "mfu_percent" if by == "mfu" and has_mfu else "tokens_per_second"
    all_panels = [
        panels.pareto_panel(facts, speed=speed),
        panels.throughput_panel(facts, answer),
        panels.split_panel(facts),
        panels.loss_panel(facts),
        panels.expert_panel(facts),
        panels.timeline_panel(facts),
        panels.estimate_panel(facts),
    ]
    return {panel.name: panel for panel in all_panels if panel is not None}


def _recipes(facts: Facts, answer: Answer) -> PageTable:
    """A row for each recipe, in the order of the ranking: figures of its runs that are done."""
    ranking = answer.ranking
    places = {id(entry): place for place, entry in enumerate(ranking.ranked, 1)}
    rows = []
    for entry in (*ranking.entries, *([ranking.control] if ranking.control is not None else [])):
        group, place = entry.group, places.get(id(entry))
        near = place is not None and (ranking.is_within_noise if place == 1 else entry.is_within_noise) is True
        standing = None if place is None else f"{place}{' (within noise)' if near else ''}"
        # The control may have the label of another recipe.
        band = None if entry.group.is_control else answer.bands.get(group.label)
        interval = "" if band is None else f"{speed_text(band[0])} to {speed_text(band[1])}"
        speed = group.typical("tokens_per_second")
        ends = (f"{count} {name}" if count > 1 else name for name, count in entry.ends.items())
        label = group.label + (" *" if group.is_oversubscribed else "")
        rows.append(
            {
                "recipe": Cell(text=label, run=str(representative(group)["run"])),
                "place": text("control" if entry.group.is_control else standing),
                "processes": text(group.world),
                "runs": text(len(group.rows)),
                "tokens/s": text(round(speed) if speed is not None and speed >= 100 else speed),
                "95% interval": Cell(text=interval, is_number=True),
                "MFU %": text(group.typical("mfu_percent"), digits=3),
                "GiB": text(group.typical("memory_gib"), digits=3),
                "loss": text(group.typical("loss"), digits=5),
                "validation": text(group.typical("validation_loss"), digits=5),
                "outcomes": text(", ".join(ends)),
                "not ranked": text((entry.left_out or "").partition(":")[0]),
            }
        )
    # A column without a value says nothing.
    kept = [name for name in (rows[0] if rows else ["recipe"]) if not rows or any(row[name].text for row in rows)]
    caption = "Recipes by place: geometric means of tokens/s and MFU, medians of the rest, of the runs that are done"
    if any(row["oversubscribed"] for row in facts.done):
        caption += "; * more processes than cores"
    return PageTable(caption=caption, headings=kept, rows=[[row[name] for name in kept] for row in rows])


def _differences(facts: Facts, answer: Answer) -> Section:
    title = "Configuration against the best"
    id = "configuration"  # noqa: A001
    reference = representative(answer.best) if answer.best is not None else next(iter(facts.runs), None)
    if reference is None:
        return Section(id=id, title=title, texts=["The sweep has no run."])
    comparison = differences(facts, reference)
    name = str(reference["run"])
    if comparison is None:
        return Section(id=id, title=title, texts=[f"The config.yaml of {name} cannot be read."])
    which = "the best" if answer.best is not None else "the first one, because no run is done"
    intro = f"Compared with {name}, {which}. Names, paths and the number of the repeat are left out."
    rows = []
    for group, items in comparison:
        lines = [f"{key}: {ours} → {theirs}" for key, ours, theirs in items or ()]
        left = len(lines) - _MOST_KEYS
        if lines:
            more = [f"and {counted(left, 'key')} more"] if left > 0 else []
            shown = Cell(text="", items=[*lines[:_MOST_KEYS], *more], more="\n".join(lines) if left > 0 else "")
        elif items is None:
            shown = text("config.yaml cannot be read")
        else:
            is_reference = name in (row["run"] for row in group.rows)
            shown = text("the recipe that the others are compared with" if is_reference else "the same")
        rows.append([Cell(text=group.label, run=str(group.rows[0]["run"])), text(len(group.rows)), shown])
    table = PageTable(caption="Keys that differ", headings=["recipe", "runs", "key: best → here"], rows=rows)
    return Section(id=id, title=title, texts=[intro], tables=[table])


def _dropped(facts: Facts) -> Section:
    reasons = Counter(
        (row["dropped_stage"] or "", row["cause"] or "") for row in facts.rows if row["state"] == "dropped"
    )
    if not reasons:
        return Section(id="dropped", title="Dropped points", texts=["No point was dropped."])
    rows = [[text(stage), text(count), _cut(reason)] for (stage, reason), count in reasons.most_common()]
    intro = f"{counted(sum(reasons.values()), 'point')} came to no run."
    table = PageTable(caption="Dropped points by reason", headings=["stage", "points", "reason"], rows=rows)
    return Section(id="dropped", title="Dropped points", texts=[intro], tables=[table])


def _failures(facts: Facts) -> Section:
    bad = [row for row in facts.runs if state_tone(row) in ("bad", "halted")]
    if not bad:
        return Section(id="failures", title="Failures", texts=["No run has failed."])
    kinds = Counter(map(state_word, bad))
    meanings = [
        f"{count} {kind}" + (f" ({OutcomeKind(kind).meaning})" if kind in list(OutcomeKind) else "")
        for kind, count in kinds.most_common()
    ]
    rows = [
        [
            run_cell(row["run"]),
            text(row["layout.label"]),
            text(state_word(row)),
            text(None if row["step"] is None else f"{row['step']} of {row['steps']}"),
            text(row["rank"]),
            _cut(redact(row["cause"] or "")),
        ]
        for row in bad
    ]
    table = PageTable(
        caption="Runs that did not end as done",
        headings=["run", "layout", "outcome", "step", "rank", "cause"],
        rows=rows,
    )
    return Section(
        id="failures",
        title="Failures",
        texts=[f"{counted(len(bad), 'run')}: {'; '.join(meanings)}."],
        tables=[table],
        details=_tracebacks(facts, bad),
    )


def _tracebacks(facts: Facts, bad: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """The traceback of one run of each cause."""
    tracebacks: dict[tuple[str, str], tuple[str, str]] = {}
    for row in bad:
        key = (state_word(row), row["cause"] or "")
        if key in tracebacks or len(tracebacks) == _MOST_TRACEBACKS:
            continue
        try:
            failure = failure_text(facts.run(row), row)
        except (TitanlabError, OSError):
            continue
        if failure is not None:
            source, words = failure
            shown = words if len(words) <= _MOST_TRACEBACK else f"…{words[-_MOST_TRACEBACK:]}"
            tracebacks[key] = (f"{row['run']}: {source}", redact(shown))
    return list(tracebacks.values())


def _parity(folder: Path) -> list[Section]:
    """The section of the sweep's parity.json; none without that file."""
    title = "Do the recipes train the same?"
    try:
        parity = read_parity(folder)
    except TitanlabError as error:
        return [Section(id="parity", title=title, texts=[f"{PARITY_FILE} cannot be read: {error}"])]
    if parity is None:
        return []
    failed = sum(row.get("passed") is not True for row in parity["rows"])
    intro = f"{counted(len(parity['rows']), 'comparison')} with {parity['reference'] or 'the reference'}"
    intro += f", {parity['time']}: " if parity["time"] else ": "
    intro += "all within their tolerances." if not failed else f"{failed} not within the tolerance."
    headings = ["run", "layout", "precision", "verdict", "loss", "gradient norm", "gradient", "parameter", "tolerance"]
    rows = [
        [
            run_cell(row["run"]),
            *(_plain(row.get(name)) for name in ("layout", "precision")),
            text("PASS" if passed is True else "FAIL" if passed is False else "unknown"),
            *(_plain(row.get(name)) for name in ("loss", "grad_norm", "gradient", "parameter", "tolerance")),
            _cut(str(row.get("reason") or "")),
        ]
        for row in parity["rows"]
        for passed in [row.get("passed")]
    ]
    table = PageTable(caption="Largest differences", headings=[*headings, "reason"], rows=rows)
    return [Section(id="parity", title=title, texts=[intro], tables=[table])]


def _plain(value: Any) -> Cell:
    """A value of parity.json: a text, a difference, a difference with its tensor, or tolerances by name."""
    return Cell(text=_plain_text(value))


def _plain_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain_text(inner)}" for key, inner in value.items())
    if isinstance(value, list) and len(value) == 2:
        return _plain_text(value[0]) + (f" ({value[1]})" if value[1] else "")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "" if value is None else str(value)
    return f"{value:.2g}"


def _provenance(facts: Facts) -> Section:
    source_list = sources(facts)
    columns = [
        [_runs(value) if name == "runs" else text(value) for name, value in source.items()] for source in source_list
    ]
    caption = "Runs by the code, the versions and the machines that made them"
    tables = []
    if source_list:
        names = list(source_list[0])
        if len(source_list) <= _MOST_SOURCES:
            headings = ["fact", *(f"source {place}" for place, _ in enumerate(source_list, 1))]
            rows = [[text(name), *cells] for name, *cells in zip(names, *columns, strict=True)]
        else:
            headings, rows = names, columns
        tables = [PageTable(caption=caption, headings=headings, rows=rows)]
    origin = facts.sweep.manifest().get("origin")
    texts = [f"The sweep is {origin}."] if isinstance(origin, str) and origin != "command line" else []
    if not source_list:
        texts.append("No run has begun, so that nothing is recorded of code and machines.")
    return Section(id="provenance", title="Provenance", texts=texts, command=command_line(facts), tables=tables)


def _runs(names: Sequence[str]) -> Cell:
    """The number of runs, and their folders on demand."""
    if len(names) == 1:
        return run_cell(names[0])
    return Cell(text=counted(len(names), "run"), more="\n".join(names))


def _cut(words: str, most: int = _MOST_CAUSE) -> Cell:
    """A long text, of which the beginning is visible."""
    return Cell(text=words) if len(words) <= most else Cell(text=f"{words[:most]}…", more=words[:10_000])
