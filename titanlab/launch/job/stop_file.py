"""Why a job is to end: one process of it finds out, and writes it down for the others (`attempts/N/stop.json`).

A scheduler signals all processes at once. The first reason that is written stands, so that all ranks act alike.
"""

from __future__ import annotations

import contextlib
import json
import signal
import time
from pathlib import Path

from titanlab.launch.contract import Launcher, Place, StopReason
from titanlab.records.outcome import OutcomeKind

FILE = "stop.json"


def meaning(
    number: int, launcher: Launcher, place: Place, *, signal_seconds: float, cancelled_by: str | None
) -> StopReason:
    """What a signal to a job means: preemption, the end of its time, or a person who cancels it.

    Args:
        signal_seconds: how long before its time limit the job asked to be warned.
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
    """Write a reason into an attempt's folder, unless there is one. Returns the one that stands."""
    text = json.dumps({"schema": 1, "kind": reason.kind.value, "cause": reason.cause, "time": time.time()})
    # A reader who sees half of it sees nothing, and looks again.
    with contextlib.suppress(FileExistsError), (attempt / FILE).open("x", encoding="utf-8") as file:
        file.write(text)
    return read_stop(attempt) or reason


def read_stop(attempt: Path) -> StopReason | None:
    """The reason in an attempt's folder."""
    try:
        value = json.loads((attempt / FILE).read_text(encoding="utf-8"))
        return StopReason(kind=OutcomeKind(value["kind"]), cause=str(value["cause"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
