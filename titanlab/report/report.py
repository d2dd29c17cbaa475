"""Writes the report of a sweep: one HTML file, and its figures as files for papers."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from titanlab.errors import ConfigError
from titanlab.report.facts import Facts, answer_of, checked
from titanlab.report.frames import folder_of
from titanlab.report.sections import panels_of
from titanlab.sweep.rows import SweepTable
from titanlab.sweep.sweep_folder import SweepFolder
from titanlab.system.files import user_path, write_text

if TYPE_CHECKING:
    from titanlab.report.figures.svg import TracedFigure


class Report(NamedTuple):
    """What was written.

    Attributes:
        file: the page.
        figures: files of its figures.
        sentence: the answer.
    """

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
        rows: of the sweep's table.
        into: the HTML file.
        figures: a folder, made if it is missing.
        format: `png`, `svg` or `pdf`.
        by: what the recipes are ranked by: `tps`, `mfu` or `memory`.

    Raises:
        ConfigError: matplotlib is missing, or a file cannot be written.
    """
    check_matplotlib(sweep.name)
    from titanlab.report.figures import svg
    from titanlab.report.page import html

    facts = Facts(sweep, checked(rows), time.time())
    answer = answer_of(facts, by=by)
    panels = panels_of(facts, answer, by=by)
    written = []
    if figures is not None:
        _make_folder(figures, key="--figures")
        for name, panel in panels.items():
            path = figures / f"{name}.{format}"
            svg.save(panel.figure, path)
            written.append(path)
    _make_folder(into.parent, key="--into")
    page = html(facts, answer, panels, into=into.parent)
    try:
        write_text(into, page)
    except OSError as error:
        rule = f"cannot be written ({error.strerror or error})"
        raise ConfigError("--into", into, rule, "try --into FILE or FOLDER of yours") from error
    return Report(into, written, answer.sentence)


def sweep_figures(path: Path | str, *, by: str = "tps") -> dict[str, TracedFigure]:
    """The figures of a sweep's report by their names, as matplotlib figures.

    Args:
        path: the sweep's folder.
        by: as for `write_report`.

    Raises:
        ConfigError: matplotlib is missing, or the path is no sweep's folder.
    """
    sweep = folder_of(user_path(path))
    check_matplotlib(sweep.name)
    facts = Facts(sweep, checked(SweepTable(sweep).rows()), time.time())
    return {name: panel.figure for name, panel in panels_of(facts, answer_of(facts, by=by), by=by).items()}


def check_matplotlib(sweep: str) -> None:
    """Check that matplotlib is installed, without importing it.

    Raises:
        ConfigError: it is not.
    """
    if importlib.util.find_spec("matplotlib") is None:
        rule = "its report needs matplotlib, which is not installed"
        raise ConfigError("sweep", sweep, rule, "pip install 'titanlab[plots]'")


def _make_folder(folder: Path, *, key: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        rule = f"cannot be made ({error.strerror or error})"
        raise ConfigError(key, folder, rule, "name a folder of yours") from error
