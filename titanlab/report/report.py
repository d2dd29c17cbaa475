"""Writes the report of a sweep: one HTML file, and its figures as files for papers."""

from __future__ import annotations

import importlib.util
import os
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import titanlab
from titanlab.errors import ConfigError
from titanlab.report.facts import Facts, checked, moment
from titanlab.report.figures.style import printable
from titanlab.report.frames import folder_of
from titanlab.report.panels import Section, figure_sections, memory_text, speed_text
from titanlab.report.sections import sections_of
from titanlab.report.stories import answer_of, scaling_texts, story_sections
from titanlab.sweep import SweepFolder, SweepTable, notes_of, state_counts
from titanlab.system import counted, grouped, significant, user_path, write_text

_FOLDER = Path(__file__).parent
_MOST_LEFT_OUT = 3
_SIZES = (("layers", "layers"), ("dim", "wide"))

if TYPE_CHECKING:
    from titanlab.report.figures.traced import TracedFigure


class Report(NamedTuple):
    """What `write_report` has written, and the report's answer in one sentence."""

    file: Path
    figures: list[Path]
    sentence: str


def write_report(
    sweep: SweepFolder,
    rows: Sequence[Mapping[str, Any]],
    *,
    into: Path,
    figures: Path | None = None,
    format: str = "png",  # noqa: A002
    by: str = "tps",
) -> Report:
    """Write the page atomically, and its figures if a folder for them is given.

    Args:
        format: `png`, `svg` or `pdf`.
        by: what ranks the recipes: `tps`, `mfu` or `memory`.

    Raises:
        ConfigError: matplotlib is missing, or a file cannot be written.
    """
    check_matplotlib(sweep.name)
    from titanlab.report.figures import svg

    facts = Facts(sweep, checked(rows), time.time(), by)
    sections = sections_of(facts)
    written = []
    if figures is not None:
        _make_folder(figures, key="--figures")
        for section in sections:
            if section.figure is not None:
                written.append(figures / f"{section.id}.{format}")
                svg.save(section.figure, written[-1])
    _make_folder(into.parent, key="--into")
    page = html(facts, sections, into=into.parent)
    try:
        write_text(into, page)
    except OSError as error:
        rule = f"cannot be written ({error.strerror or error})"
        raise ConfigError("--into", into, rule, "try --into FILE or FOLDER of yours") from error
    return Report(into, written, answer_of(facts))


def sweep_figures(path: Path | str, *, by: str = "tps") -> dict[str, TracedFigure]:
    """The figures of a sweep's report by their names, as matplotlib figures.

    Args:
        path: the sweep's folder.

    Raises:
        ConfigError: matplotlib is missing, or the path is not the folder of a sweep.
    """
    sweep = folder_of(user_path(path))
    check_matplotlib(sweep.name)
    facts = Facts(sweep, checked(SweepTable(sweep).rows()), time.time(), by)
    sections = [*story_sections(facts), *figure_sections(facts)]
    return {section.id: section.figure for section in sections if section.figure is not None}


def check_matplotlib(sweep: str) -> None:
    """Check that matplotlib is installed, without importing it; raise a ConfigError if it is not."""
    if importlib.util.find_spec("matplotlib") is None:
        rule = "its report needs matplotlib, which is not installed"
        raise ConfigError("sweep", sweep, rule, "pip install 'titanlab[plots]'")


def _make_folder(folder: Path, *, key: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        rule = f"cannot be made ({error.strerror or error})"
        raise ConfigError(key, folder, rule, "name a folder of yours") from error


def html(facts: Facts, sections: Sequence[Section], *, into: Path) -> str:
    """The page as HTML; its links to run folders are relative to `into`, the folder of the page."""
    # Imported here: the packages for plots are optional.
    import jinja2
    from markupsafe import Markup

    from titanlab.report.figures import svg

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        # Remove characters that a page must not have, except in our own markup.
        finalize=lambda value: printable(value, kept="\n\t") if type(value) is str else value,
        trim_blocks=True,
    )
    # Figures are markup: their texts are escaped when they are drawn.
    drawn = {
        each.id: Markup(
            svg.element(each.figure, name=each.id, title=each.title, description=printable(each.description))
        )
        for each in sections
        if each.figure is not None
    }
    return environment.get_template("page.html").render(
        name=facts.sweep.name,
        sentence=answer_of(facts),
        facts=_facts(facts),
        notes=[*notes_of(facts.ranking), *_notes(facts)],
        sections=sections,
        drawn=drawn,
        css=Markup((_FOLDER / "style.css").read_text(encoding="utf-8")),
        version=titanlab.__version__,
        made=moment(facts.made),
        folder=str(facts.sweep.path),
        link=lambda run: _link(facts.sweep.path, run, into),
    )


def _link(sweep: Path, run: str, into: Path) -> str:
    """The address of a run's folder, relative to the report."""
    path = os.path.relpath(sweep / Path(run).name, into)
    address = urllib.parse.quote(os.fsencode(path))
    # A name with a colon would be read as a scheme.
    return address if address.startswith((".", "/")) else f"./{address}"


def _facts(facts: Facts) -> list[tuple[str, str]]:
    """The labels and values that the page shows below the answer."""
    devices = {str(row["device"] or row["accelerator"]) for row in facts.runs if row["accelerator"]}
    models, starts, ends, hours = set[str](), list[float](), list[float](), 0.0
    for row in facts.runs:
        if row["model"]:
            sizes = [f"{row[name]} {unit}" for name, unit in _SIZES if row[name] is not None]
            models.add(f"{row['model']} ({', '.join(sizes)})")
        starts += [row["started"]] if row["started"] else []
        ends += [row["ended"]] if row["ended"] else []
        if row["started"] and row["ended"]:
            hours += (row["ended"] - row["started"]) * (row["world"] or 0) / 3600
    on_gpus = any(row["accelerator"] == "cuda" for row in facts.runs)
    first, speed = facts.speeds.first, ""
    if first is not None and first.centre is not None:
        speed = f"{speed_text(first.centre)} tokens/s per device, {speed_text(first.centre * first.group.world)} in all"
    pairs = [
        ("notes", facts.sweep.notes() or _few({str(row["notes"]) for row in facts.runs if row["notes"]})),
        ("fastest", speed),
        ("scaling efficiency", "; ".join(scaling_texts(facts))),
        ("memory by item", memory_text(facts)),
        ("GPU-hours" if on_gpus else "process-hours", significant(hours, 3) if hours > 0 else ""),
        ("runs", state_counts(facts.rows).removeprefix(f"{counted(len(facts.runs), 'run')}: ")),
        ("recipes", grouped(len(facts.groups)) if facts.groups else ""),
        ("model", _few(models)),
        ("device", _few(devices)),
        ("began", moment(min(starts, default=None))),
        ("last ended", moment(max(ends, default=None))),
    ]
    return [(label, value) for label, value in pairs if value]


def _few(texts: set[str]) -> str:
    return ", ".join(sorted(texts)[:3]) + (f" and {len(texts) - 3} more" if len(texts) > 3 else "")


def _notes(facts: Facts) -> list[str]:
    """Sentences that warn about the numbers of the report."""

    def about(rows: Sequence[Mapping[str, Any]], text: str, noun: str = "run") -> list[str]:
        return [f"{counted(len(rows), noun)} {text}"] if rows else []

    done = facts.done
    notes = about(
        [row for row in done if row["oversubscribed"]],
        "had more processes than cores. They took turns, so that their speed says nothing about the layout; memory and "
        "losses count.",
    )
    if done and all(row["accelerator"] == "cpu" for row in done):
        notes.append("These are speeds of a CPU: they do not transfer to GPUs.")
    lacks = "emulated products that the device lacks, such as float8: their speed gets no place."
    notes += about([row for row in done if row["emulated"]], lacks)
    reasons = dict.fromkeys(row["cause"] for row in facts.rows if row["dropped_stage"] in ("rule", "memory"))
    notes += [f"Left out: {reason}." for reason in list(reasons)[:_MOST_LEFT_OUT]]
    codes = {row["code"] for row in done if row["code"]}
    if len(codes) > 1:
        notes.append(f"The runs were made by {len(codes)} different states of the code; see Provenance.")
    damaged = [row for row in facts.runs if row["state"] in ("unreadable", "missing")]
    notes += about(damaged, "cannot be read or are gone; see Failures.", "run folder")
    unmeasured = [row for row in done if row["measured_steps"] == 0]
    notes += about(unmeasured, "are done without a step after the warm-up: they have no speed.")
    if skipping := [row for row in facts.runs if (row["skipped_steps"] or 0) > 0]:
        steps, of = sum(row["skipped_steps"] for row in skipping), counted(len(skipping), "run")
        notes.append(f"{counted(steps, 'step')} of {of} updated nothing, since their gradients were not finite.")
    return notes
