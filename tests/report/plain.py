"""Facts of a report, from rows that are written down."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.sweep.table.plain import row
from titanlab.report.facts import Facts
from titanlab.sweep import SweepFolder, SweepTable


def facts_of(*rows: dict[str, Any], folder: Path | str = "/nowhere/layouts", by: str = "tps") -> Facts:
    """The facts of rows; those without a name get one, `r0`, `r1`, …, in their order."""
    named = [
        each if each["run"] or each["state"] == "dropped" else {**each, "run": f"r{place}", "name": f"r{place}"}
        for place, each in enumerate(rows)
    ]
    return Facts(SweepFolder(Path(folder)), named, 0.0, by)


def facts_in(folder: SweepFolder) -> Facts:
    """The facts of a sweep's folder."""
    return Facts(folder, SweepTable(folder).rows(), 0.0)


def run(name: str, recipe: str = "dp_s2", speed: float | None = 1000.0, **given: Any) -> dict[str, Any]:
    """The row of a run that is done."""
    return row(recipe, speed, **{"run": name, "name": name, "step": 10, "steps": 10, "attempt": 1, **given})
