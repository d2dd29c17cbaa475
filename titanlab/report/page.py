"""Renders a report as one HTML file, which needs no network and runs no script."""

from __future__ import annotations

import dataclasses
import os
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

import titanlab
from titanlab.report.facts import Answer, Facts, moment
from titanlab.report.figures import svg
from titanlab.report.figures.style import printable
from titanlab.report.panels import Panel
from titanlab.report.sections import sections_of
from titanlab.sweep.listing import counts
from titanlab.sweep.ranking import notes_of
from titanlab.system.text import counted, grouped

_FOLDER = Path(__file__).parent


def html(facts: Facts, answer: Answer, figures: Mapping[str, Panel], *, into: Path) -> str:
    """The page.

    Args:
        into: the folder for its file, from which links to run folders go.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_clean,
        trim_blocks=True,
    )
    drawn = {name: _Drawn(panel) for name, panel in figures.items()}
    sections = [
        dataclasses.replace(section, panel=drawn[section.panel.name] if section.panel else None)  # type: ignore[arg-type]
        for section in sections_of(facts, answer, figures)
    ]
    return environment.get_template("page.html").render(
        name=facts.sweep.name,
        sentence=answer.sentence,
        facts=_facts(facts),
        notes=[*notes_of(answer.ranking), *_notes(facts)],
        sections=sections,
        css=Markup((_FOLDER / "style.css").read_text(encoding="utf-8")),
        version=titanlab.__version__,
        made=moment(facts.made),
        folder=str(facts.sweep.path),
        link=lambda run: _link(facts.sweep.path, run, into),
    )


class _Drawn:
    """A panel whose figure is an element of the page."""

    def __init__(self, panel: Panel) -> None:
        self.panel = panel
        text = svg.element(panel.figure, name=panel.name, title=panel.title, description=printable(panel.description))
        # Its texts were escaped when it was written.
        self.svg = Markup(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.panel, name)


def _clean(value: Any) -> Any:
    """Text without characters that a page must not have; markup of ours stays."""
    return printable(value, kept="\n\t") if isinstance(value, str) and not isinstance(value, Markup) else value


def _link(sweep: Path, run: str, into: Path) -> str:
    """The address of a run's folder, relative to the report."""
    # Where two disks have no common path, the address is absolute.
    path = os.path.relpath(sweep / Path(run).name, into)
    address = urllib.parse.quote(os.fsencode(path))
    # A name with a colon would be read as a scheme.
    return address if address.startswith((".", "/")) else f"./{address}"


def _facts(facts: Facts) -> list[tuple[str, str]]:
    """What stands below the answer."""
    devices = sorted({str(row["device"] or row["accelerator"]) for row in facts.runs if row["accelerator"]})
    models = sorted({f"{row['model']} ({_size(row)})" for row in facts.runs if row["model"]})
    starts = [row["started"] for row in facts.runs if row["started"]]
    ends = [row["ended"] for row in facts.runs if row["ended"]]
    pairs = [
        ("runs", counts(facts.rows).removeprefix(f"{counted(len(facts.runs), 'run')}: ")),
        ("recipes", grouped(len(facts.groups)) if facts.groups else ""),
        ("model", _few(models)),
        ("device", _few(devices)),
        ("began", moment(min(starts, default=None))),
        ("last ended", moment(max(ends, default=None))),
    ]
    return [(label, value) for label, value in pairs if value]


def _size(row: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{row[name]} {text}" for name, text in (("layers", "layers"), ("dim", "wide")) if row[name] is not None
    )


def _few(texts: Sequence[str]) -> str:
    return ", ".join(texts[:3]) + (f" and {len(texts) - 3} more" if len(texts) > 3 else "")


def _notes(facts: Facts) -> list[str]:
    """What a reader should know before believing the figures."""
    notes = []
    crowded = [row for row in facts.done if row["oversubscribed"]]
    if crowded:
        notes.append(
            f"{counted(len(crowded), 'run')} had more processes than cores. They took turns, so that their speed says "
            "nothing about the layout; memory and losses count."
        )
    codes = {row["code"] for row in facts.done if row["code"]}
    if len(codes) > 1:
        notes.append(f"The runs were made by {len(codes)} different states of the code; see Provenance.")
    damaged = [row for row in facts.runs if row["state"] in ("unreadable", "missing")]
    if damaged:
        notes.append(f"{counted(len(damaged), 'run folder')} cannot be read or are gone; see Failures.")
    lost = [row for row in facts.done if row["measured_steps"] == 0]
    if lost:
        notes.append(f"{counted(len(lost), 'run')} are done without a step after the warm-up: they have no speed.")
    skipping = [row for row in facts.runs if (row["skipped_steps"] or 0) > 0]
    if skipping:
        steps = sum(row["skipped_steps"] for row in skipping)
        of = counted(len(skipping), "run")
        notes.append(f"{counted(steps, 'step')} of {of} updated nothing, since their gradients were not finite.")
    return notes
