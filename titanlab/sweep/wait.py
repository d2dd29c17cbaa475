"""Following a sweep until all of its runs have ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from titanlab.records.outcome import OutcomeKind
from titanlab.sweep.enqueue import wake
from titanlab.sweep.sweep_folder import SweepFolder
from titanlab.sweep.table.look import look_at
from titanlab.sweep.table.watch import Screen


def follow(folder: SweepFolder) -> list[dict[str, Any]]:
    """Show a sweep until nothing of it runs or waits; Ctrl-C leaves it to itself. Returns the rows of its table.

    A supervisor that was killed meanwhile is replaced.
    """
    look = look_at(folder)

    def look_and_wake() -> list[dict[str, Any]]:
        wake(folder)
        return look()

    return Screen().follow(folder.name, look_and_wake)


def exit_code(rows: Sequence[Mapping[str, Any]]) -> int:
    """Of the first run that did not end well, or 0; of one that has not ended, that of a person's interruption."""
    for row in rows:
        if row["state"] == "dropped" or row["outcome"] == OutcomeKind.DONE.value:
            continue
        kind = OutcomeKind(row["outcome"]) if row["outcome"] else OutcomeKind.CANCELLED
        return int(kind.exit_code)
    return 0
