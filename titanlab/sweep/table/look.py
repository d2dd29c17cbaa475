"""Repeated reads of a sweep: every call reads the run folders, but asks the scheduler only every few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import titanlab
from titanlab.launch.contract import States
from titanlab.launch.launchers import launcher_named
from titanlab.records.provenance import code_fingerprint
from titanlab.sweep.reconcile import close_dead_runs, reconcile
from titanlab.sweep.sweep_folder import SweepFolder
from titanlab.sweep.table.estimates import LateEstimates
from titanlab.sweep.table.rows import Table

# A scheduler serves many users, so do not ask it at every call; without a scheduler only local files are read.
_ASK_SECONDS = 10.0


def look_at(
    sweep: SweepFolder,
    report: Callable[[str], None] = lambda line: None,
    *,
    estimates: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> Callable[[], list[dict[str, Any]]]:
    """A function that returns the sweep's current rows at every call.

    Args:
        estimates: whether runs for which no estimate was kept are estimated now, which takes some seconds.

    Runs whose jobs have ended without a result get one; if that cannot be written, `report` is called, once for each
    message.
    """
    reported: set[str] = set()

    def once(line: str) -> None:
        if line not in reported:
            reported.add(line)
            report(line)

    code = code_fingerprint(Path(titanlab.__file__).parent)
    table = Table(sweep, code=code, late=LateEstimates() if estimates else None)
    states: States = {}
    due = -float("inf")

    def look() -> list[dict[str, Any]]:
        nonlocal states, due
        submitted = sweep.submissions()
        if not submitted:
            close_dead_runs(sweep)
        elif clock() >= due:
            states = reconcile(sweep, once)
            if any(launcher_named(submission.launcher).has_scheduler for submission in submitted):
                due = clock() + _ASK_SECONDS
        return table.rows(states)

    return look
