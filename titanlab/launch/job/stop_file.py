"""Why a job must end: one process determines the reason and writes it for the others (`attempts/N/stop.json`).

A scheduler signals all processes at once. The first reason that is written counts, so that all ranks act alike. If the
scheduler does not tell the reason soon, the ranks are told to save all the same: its grace time is short.
"""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

from titanlab.launch.contract import Launcher, Place, StopReason
from titanlab.launch.job.job import Job, say
from titanlab.records.outcome import Outcome, OutcomeKind
from titanlab.system.files import read_text

FILE = "stop.json"
# Rank 0 has this time to write the meaning of a signal, before another rank does.
MEANING_SECONDS = 5.0
# After this time without the scheduler's answer, the ranks are told to save.
ASK_SECONDS = 2.0
# When the ranks have saved and ended, its answer is awaited for so long.
LATE_SECONDS = 30.0


class StopCheck:
    """Looks whether a job must stop, and finds out why.

    Args:
        job: of this process.
        signal_seconds: how long before its time limit the job asked for a warning.
    """

    def __init__(self, job: Job, *, signal_seconds: float) -> None:
        self._job, self._signal_seconds = job, signal_seconds
        self._asks: threading.Thread | None = None
        self._meaning: StopReason | None = None
        self._assumed: StopReason | None = None

    def look(self, attempt: Path) -> None:
        """Write the reason to stop for all ranks of an attempt, unless there is none, or another rank has."""
        job = self._job
        cancelled_by = job.run.asked_to_cancel() if job.leads or job.signals else None
        if not job.signals and cancelled_by is None:
            return
        number, when = job.signals[0] if job.signals else (int(signal.SIGTERM), time.monotonic())
        is_late = time.monotonic() - when > MEANING_SECONDS
        if read_stop(attempt) is not None or not (job.leads or is_late):
            return
        if self._asks is None:
            self._asks = threading.Thread(target=self._ask, args=(number, cancelled_by), name="why", daemon=True)
            self._asks.start()
        self._asks.join(ASK_SECONDS)
        reason = self._meaning
        if reason is None:
            cause = f"job {job.place.job_id} was sent {signal.Signals(number).name}, and the scheduler does not say why"
            reason = self._assumed = StopReason(kind=OutcomeKind.PREEMPTED, cause=cause)
        stop = write_stop(attempt, reason)
        say(f"{stop.kind.value}: {stop.cause}; the ranks are told to save and end")

    def corrected(self, outcome: Outcome) -> Outcome:
        """The outcome of an attempt, with the scheduler's reason if that came after the ranks were told to save."""
        assumed, cause = self._assumed, outcome.cause or ""
        if assumed is None or self._asks is None or not cause.startswith(assumed.cause):
            return outcome
        self._asks.join(LATE_SECONDS)
        if self._meaning is None:
            return outcome
        kind, cause = self._meaning.kind, self._meaning.cause + cause.removeprefix(assumed.cause)
        code = outcome.exit_code if outcome.exit_code != assumed.kind.exit_code else kind.exit_code
        return replace(outcome, kind=kind, cause=cause, exit_code=code)

    def _ask(self, number: int, cancelled_by: str | None) -> None:
        job = self._job
        self._meaning = meaning(
            number, job.launcher, job.place, signal_seconds=self._signal_seconds, cancelled_by=cancelled_by
        )


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
