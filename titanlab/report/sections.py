"""The sections of a report, in the page's order."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from titanlab.errors import TitanlabError
from titanlab.prove import PARITY_FILE, read_parity
from titanlab.records import OutcomeKind, redact
from titanlab.report.facts import Facts, command_line, differences, representative, sources
from titanlab.report.panels import Cell, PageTable, Section, cell, figure_sections, run_cell, speed_text, table
from titanlab.report.stories import story_sections
from titanlab.sweep import failure_text, state_tone, state_word
from titanlab.system import counted

_MOST_CAUSE = 300
_MOST_TRACEBACKS, _MOST_TRACEBACK = 12, 4_000
_MOST_KEYS = 20
_MOST_SOURCES = 4


def sections_of(facts: Facts) -> list[Section]:
    """All sections; a section without content says why."""
    return [
        *story_sections(facts),
        *(
            replace(section, tables=[_recipes(facts)]) if section.id == "throughput" else section
            for section in figure_sections(facts)
        ),
        _differences(facts),
        _dropped(facts),
        _failures(facts),
        *_parity(facts.sweep.path),
        _provenance(facts),
    ]


def _recipes(facts: Facts) -> PageTable:
    """A table with a row for each recipe, in the order of the ranking; it covers the runs that are done."""
    ranking = facts.ranking
    places = {id(entry): place for place, entry in enumerate(ranking.ranked, 1)}
    rows = []
    for entry in (*ranking.entries, *([ranking.control] if ranking.control is not None else [])):
        group, place = entry.group, places.get(id(entry))
        near = place is not None and (ranking.is_within_noise if place == 1 else entry.is_within_noise) is True
        standing = None if place is None else f"{place}{' (within noise)' if near else ''}"
        # The control has no interval: `bands` goes by label, and another recipe may have the same label.
        band = None if group.is_control else facts.bands.get(group.label)
        interval = "" if band is None else f"{speed_text(band[0])} to {speed_text(band[1])}"
        speed = group.typical("tokens_per_second")
        ends = (f"{count} {name}" if count > 1 else name for name, count in entry.ends.items())
        label = group.label + (" *" if group.is_oversubscribed else "")
        rows.append(
            {
                "recipe": Cell(text=label, run=str(representative(group)["run"])),
                "place": cell("control" if group.is_control else standing),
                "processes": cell(group.world),
                "runs": cell(len(group.rows)),
                "tokens/s": cell(round(speed) if speed is not None and speed >= 100 else speed),
                "95% interval": Cell(text=interval, is_number=True),
                "MFU %": cell(group.typical("mfu_percent"), digits=3),
                "GiB": cell(group.typical("memory_gib"), digits=3),
                "loss": cell(group.typical("loss"), digits=5),
                "validation": cell(group.typical("validation_loss"), digits=5),
                "outcomes": cell(", ".join(ends)),
                "not ranked": cell((entry.left_out or "").partition(":")[0]),
            }
        )
    # Leave out columns without any value.
    kept = [name for name in rows[0] if any(row[name].text for row in rows)] if rows else ["recipe"]
    caption = "Recipes by place: geometric means of tokens/s and MFU, medians of the rest, of the runs that are done"
    if any(row["oversubscribed"] for row in facts.done):
        caption += "; * more processes than cores"
    return table(caption, kept, [[row[name] for name in kept] for row in rows])


def _differences(facts: Facts) -> Section:
    section = Section(id="configuration", title="Configuration against the best")
    reference = representative(facts.best) if facts.best is not None else next(iter(facts.runs), None)
    if reference is None:
        return replace(section, texts=["The sweep has no run."])
    comparison = differences(facts, reference)
    name = str(reference["run"])
    if comparison is None:
        return replace(section, texts=[f"The config.yaml of {name} cannot be read."])
    which = "the best" if facts.best is not None else "the first one, because no run is done"
    intro = f"Compared with {name}, {which}. Names, paths and the number of the repeat are left out."
    rows = []
    for group, items in comparison:
        lines = [f"{key}: {ours} → {theirs}" for key, ours, theirs in items or ()]
        shown: Any = "config.yaml cannot be read" if items is None else "the same"
        if name in (row["run"] for row in group.rows):
            shown = "the recipe that the others are compared with"
        elif (left := len(lines) - _MOST_KEYS) > 0:
            first = [*lines[:_MOST_KEYS], f"and {counted(left, 'key')} more"]
            shown = Cell(text="", items=first, more="\n".join(lines))
        elif lines:
            shown = Cell(text="", items=lines)
        rows.append([Cell(text=group.label, run=str(group.rows[0]["run"])), len(group.rows), shown])
    keys = table("Keys that differ", ["recipe", "runs", "key: best → here"], rows)
    return replace(section, texts=[intro], tables=[keys])


def _dropped(facts: Facts) -> Section:
    section = Section(id="dropped", title="Dropped points")
    reasons = Counter(
        (row["dropped_stage"] or "", row["cause"] or "") for row in facts.rows if row["state"] == "dropped"
    )
    if not reasons:
        return replace(section, texts=["No point was dropped."])
    rows = ([stage, count, _cut(reason)] for (stage, reason), count in reasons.most_common())
    by_reason = table("Dropped points by reason", ["stage", "points", "reason"], rows)
    return replace(section, texts=[f"{counted(reasons.total(), 'point')} came to no run."], tables=[by_reason])


def _failures(facts: Facts) -> Section:
    section = Section(id="failures", title="Failures")
    bad = [row for row in facts.runs if state_tone(row) in ("bad", "halted")]
    if not bad:
        return replace(section, texts=["No run has failed."])
    meanings = [
        f"{count} {kind}" + (f" ({OutcomeKind(kind).meaning})" if kind in list(OutcomeKind) else "")
        for kind, count in Counter(map(state_word, bad)).most_common()
    ]
    rows = []
    for row in bad:
        step = None if row["step"] is None else f"{row['step']} of {row['steps']}"
        cause = _cut(redact(row["cause"] or ""))
        rows.append([run_cell(row["run"]), row["layout.label"], state_word(row), step, row["rank"], cause])
    headings = ["run", "layout", "outcome", "step", "rank", "cause"]
    return replace(
        section,
        texts=[f"{counted(len(bad), 'run')}: {'; '.join(meanings)}."],
        tables=[table("Runs that did not end as done", headings, rows)],
        details=_tracebacks(facts, bad),
    )


def _tracebacks(facts: Facts, bad: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """For each cause of failure, the traceback of one run."""
    tracebacks: dict[tuple[str, str], tuple[str, str]] = {}
    for row in bad:
        key = (state_word(row), row["cause"] or "")
        if key in tracebacks or len(tracebacks) == _MOST_TRACEBACKS:
            continue
        with contextlib.suppress(TitanlabError, OSError):
            if (failure := failure_text(facts.run(row), row)) is not None:
                source, words = failure
                shown = words if len(words) <= _MOST_TRACEBACK else f"…{words[-_MOST_TRACEBACK:]}"
                tracebacks[key] = (f"{row['run']}: {source}", redact(shown))
    return list(tracebacks.values())


def _parity(folder: Path) -> list[Section]:
    """The section about the sweep's parity.json; no section without that file."""
    section = Section(id="parity", title="Do the recipes train the same?")
    try:
        parity = read_parity(folder)
    except TitanlabError as error:
        return [replace(section, texts=[f"{PARITY_FILE} cannot be read: {error}"])]
    if parity is None:
        return []
    failed = sum(not row.passed for row in parity.rows)
    intro = f"{counted(len(parity.rows), 'comparison')} with {parity.reference or 'the reference'}"
    intro += f", {parity.time}: " if parity.time else ": "
    intro += "all within their tolerances." if not failed else f"{failed} not within the tolerance."
    headings = ["run", "layout", "precision", "verdict", "loss", "gradient norm", "gradient", "parameter", "tolerance"]
    rows = (
        [
            run_cell(row.run),
            row.layout,
            row.precision,
            "PASS" if row.passed else "FAIL",
            *map(_plain_text, (row.loss, row.grad_norm, row.gradient, row.parameter, row.tolerance)),
            _cut(row.reason),
        ]
        for row in parity.rows
    )
    return [replace(section, texts=[intro], tables=[table("Largest differences", [*headings, "reason"], rows)])]


def _plain_text(value: Any) -> str:
    """The text of a value of parity.json: of a number, a number with its tensor's name, or tolerances by name."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain_text(inner)}" for key, inner in value.items())
    if isinstance(value, tuple):
        return _plain_text(value[0]) + (f" ({value[1]})" if value[1] else "")
    return "" if value is None else f"{value:.2g}"


def _provenance(facts: Facts) -> Section:
    found = [
        {name: _runs(value) if name == "runs" else cell(value) for name, value in source.items()}
        for source in sources(facts)
    ]
    origin = facts.sweep.manifest().get("origin")
    texts = [f"The sweep is {origin}."] if isinstance(origin, str) and origin != "command line" else []
    section = Section(id="provenance", title="Provenance", texts=texts, command=command_line(facts))
    if not found:
        return replace(section, texts=[*texts, "No run has begun, so that nothing is recorded of code and machines."])
    names = list(found[0])
    headings, rows = names, [list(source.values()) for source in found]
    if len(found) <= _MOST_SOURCES:
        headings = ["fact", *(f"source {place}" for place, _ in enumerate(found, 1))]
        rows = [[cell(name), *(source[name] for source in found)] for name in names]
    caption = "Runs by the code, the versions and the machines that made them"
    return replace(section, tables=[table(caption, headings, rows)])


def _runs(names: Sequence[str]) -> Cell:
    """A cell with the number of runs, which shows their folders on demand."""
    if len(names) == 1:
        return run_cell(names[0])
    return Cell(text=counted(len(names), "run"), more="\n".join(names))


def _cut(words: str, most: int = _MOST_CAUSE) -> Cell:
    """A cell with a text; of a long text, only the beginning is visible."""
    return Cell(text=words) if len(words) <= most else Cell(text=f"{words[:most]}…", more=words[:10_000])
