"""Follows a sweep until all of its runs have ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from titanlab.records.outcome import OutcomeKind
from titanlab.sweep.enqueue import wake
from titanlab.sweep.sweep_folder import SweepFolder
from titanlab.sweep.table.look import look_at
from titanlab.sweep.table.watch import Screen


def follow(folder: SweepFolder) -> list[dict[str, Any]]:
    """Show a sweep until no run is active or waits, or until Ctrl-C, which does not stop runs. Returns its rows.

    If the sweep's supervisor is killed meanwhile, it is started again.
    """
    look = look_at(folder)

    def look_and_wake() -> list[dict[str, Any]]:
        wake(folder)
        return look()

    return Screen().follow(folder.name, look_and_wake)


def exit_code(rows: Sequence[Mapping[str, Any]]) -> int:
    """The exit code for the first run that is not done, 0 if all are; for a run that has not ended, that of Ctrl-C."""
    for row in rows:
        if row["state"] == "dropped" or row["outcome"] == OutcomeKind.DONE.value:
            continue
        kind = OutcomeKind(row["outcome"]) if row["outcome"] else OutcomeKind.CANCELLED
        return int(kind.exit_code)
    return 0
