"""Why a job must end: one process determines the reason and writes it for the others (`attempts/N/stop.json`).

A scheduler signals all processes at once. The first reason that is written counts, so that all ranks act alike.
"""

from __future__ import annotations

import contextlib
import json
import signal
import time
from pathlib import Path

from titanlab.launch.contract import Launcher, Place, StopReason
from titanlab.records.outcome import OutcomeKind
from titanlab.system.regular_file import read_text

FILE = "stop.json"


def meaning(
    number: int, launcher: Launcher, place: Place, *, signal_seconds: float, cancelled_by: str | None
) -> StopReason:
    """The meaning of a signal to a job: preemption, the end of its time, or a user who cancels it.

    Args:
        signal_seconds: how long before its time limit the job asked for a warning.
        cancelled_by: who has asked titanlab itself to cancel the run.
    """
    name = signal.Signals(number).name
    if cancelled_by is not None:
        return StopReason(kind=OutcomeKind.CANCELLED, cause=f"{cancelled_by}; the run can be resumed")
    if number == signal.SIGINT:
        return StopReason(kind=OutcomeKind.CANCELLED, cause="interrupted by SIGINT; the run can be resumed")
    if number == signal.SIGXCPU:
        return StopReason(kind=OutcomeKind.WALLTIME, cause="its limit of CPU time is used up (SIGXCPU)")
    return launcher.stop_reason(name, place, signal_seconds=signal_seconds)


def write_stop(attempt: Path, reason: StopReason) -> StopReason:
    """Write a reason to an attempt's folder, unless it has one. Returns the reason that counts."""
    text = json.dumps({"schema": 1, "kind": reason.kind.value, "cause": reason.cause, "time": time.time()})
    # A reader that sees an incomplete file ignores it and reads it again later.
    with contextlib.suppress(FileExistsError), (attempt / FILE).open("x", encoding="utf-8") as file:
        file.write(text)
    return read_stop(attempt) or reason


def read_stop(attempt: Path) -> StopReason | None:
    """The reason in an attempt's folder; None if there is none."""
    try:
        value = json.loads(read_text(attempt / FILE))
        return StopReason(kind=OutcomeKind(value["kind"]), cause=str(value["cause"]))
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return None
