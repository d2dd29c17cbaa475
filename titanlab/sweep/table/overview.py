"""All sweeps of a folder of runs, one line each. Only the runs' own files are read: schedulers are not asked."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlab.errors import ConfigError
from titanlab.records.outcome import OutcomeKind
from titanlab.records.run_folder import RunFolder
from titanlab.records.run_search import list_runs
from titanlab.records.run_status import STATES
from titanlab.sweep.sweep_folder import SweepFolder
from titanlab.sweep.table.listing import aligned
from titanlab.terminal.numerals import duration


@dataclass(frozen=True)
class Overview:
    """The sweeps under `runs`, latest first.

    Attributes:
        rows: `sweep`, `runs`, `states` (counts by outcome or state), `dropped`, `updated`, `folder`.
    """

    runs: str
    rows: list[dict[str, Any]]

    def lines(self, *, now: float | None = None) -> list[str]:
        """The overview as plain lines."""
        if not self.rows:
            return [
                f"no runs under {self.runs}: submit a sweep (titanlab sweep), or say where runs are (--runs FOLDER)"
            ]
        now = time.time() if now is None else now
        lines = [
            [
                row["sweep"],
                str(row["runs"]),
                ", ".join(f"{count} {word}" for word, count in row["states"].items()),
                str(row["dropped"] or ""),
                "" if row["updated"] is None else f"{duration(now - row['updated'])} ago",
            ]
            for row in self.rows
        ]
        headings = ("sweep", "runs", "of which", "dropped", "last heard of")
        return aligned(headings, lines, right=("runs", "dropped", "last heard of"))


def overview(runs: Path | str) -> Overview:
    """Read the status of every run under a folder."""
    by_sweep: dict[Path, list[RunFolder]] = {}
    for run in list_runs(runs):
        by_sweep.setdefault(run.path.parent, []).append(run)
    rows = [_row(SweepFolder(path), members) for path, members in by_sweep.items()]
    return Overview(str(runs), sorted(rows, key=lambda row: row["updated"] or 0.0, reverse=True))


def _row(sweep: SweepFolder, members: list[RunFolder]) -> dict[str, Any]:
    statuses, words = [], Counter[str]()
    for run in members:
        try:
            status = run.status()
        except ConfigError:
            words["unreadable"] += 1
            continue
        statuses.append(status)
        words["prepared" if status is None else status.outcome or status.state] += 1
    dropped = 0
    try:
        dropped = sum(bool(point.get("dropped")) for point in sweep.points())
    except ConfigError:
        # `titanlab status SWEEP` names the damaged file.
        words["unreadable"] += 1
    order = {word: place for place, word in enumerate((*(kind.value for kind in OutcomeKind), *STATES))}
    return {
        "sweep": sweep.name,
        "runs": len(members),
        "states": {word: words[word] for word in sorted(words, key=lambda word: order.get(word, len(order)))},
        "dropped": dropped,
        "updated": max((status.updated for status in statuses if status is not None), default=None),
        "folder": str(sweep.path),
    }
