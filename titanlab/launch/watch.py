"""Watches one rank of a job: asks its worker to stop, ends it after failures of other ranks, records why it ended.

Slurm sends a signal to all processes of a job at once, also to data readers and trackers. They all ignore stop signals
from their start; only the parent of the worker handles them and decides what they mean. It tells the worker by SIGHUP
and the file `stop.json` of the attempt (`distributed/stop.py`).

One process determines why the job must end and writes it for the others (`attempts/N/stop.json`). The first reason that
is written counts, so that all ranks act alike. If the scheduler does not tell the reason soon, the ranks save without
it: the grace time is short.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

from titanlab.distributed import (
    ANSWER_SECONDS,
    STOP_FILE,
    STOP_SIGNALS,
    Ranks,
    look_seconds,
    note_silence,
    read_stop,
    write_stop,
)
from titanlab.launch.attempt import note_of_exit
from titanlab.launch.contract import Launcher, ProcessPlace
from titanlab.launch.evidence import memory_kills
from titanlab.launch.job import Job, say
from titanlab.launch.processes import Escalation, RankProcesses
from titanlab.records import Outcome, OutcomeKind, RunFolder, StopReason
from titanlab.system import STOPPED, process_state


def ignore_stop_signals() -> None:
    """In a new worker: leave a scheduler's signals to the watch, and hold its own signal until it is handled."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])


# Rank 0 has this time to write the meaning of a signal, before another rank does.
MEANING_SECONDS = 5.0
# After this time without the scheduler's answer, the ranks are told to save.
ASK_SECONDS = 2.0
# The longest wait for the scheduler's answer after the ranks have saved and ended.
LATE_SECONDS = 30.0


class StopCheck:
    """Looks whether a job must stop, and finds out why.

    Args:
        signal_seconds: how long before its time limit the job asked for a warning.
    """

    def __init__(self, job: Job, *, signal_seconds: float) -> None:
        self.job, self._signal_seconds = job, signal_seconds
        self._asks: threading.Thread | None = None
        self._meaning: StopReason | None = None
        self._assumed: StopReason | None = None

    def look(self, attempt: Path) -> None:
        """Write the reason to stop for all ranks of an attempt, if there is one and no other rank has written one."""
        job = self.job
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
        launcher, place = self.job.launcher, self.job.place
        self._meaning = meaning(number, launcher, place, signal_seconds=self._signal_seconds, cancelled_by=cancelled_by)


def meaning(
    number: int, launcher: Launcher, place: ProcessPlace, *, signal_seconds: float, cancelled_by: str | None
) -> StopReason:
    """The meaning of a signal to a job: preemption, the end of its time, or a user who cancels it.

    Args:
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


# When another rank has failed, a worker has this time to record its own state; after a hang it first writes its stacks.
GRACE_SECONDS = 5.0
HANG_GRACE_SECONDS = ANSWER_SECONDS
# From the result on disk to the end of the worker.
TEARDOWN_SECONDS = 30.0
# On a shared file system, files of other nodes may appear this much later.
SETTLE_SECONDS = 10.0
RESULT_SECONDS = 120.0
VISIBLE_SECONDS = 2.0
# Between two looks at the worker itself.
_POLL_SECONDS = 0.2


class RankWatch:
    """Watches one rank's worker in one attempt."""

    def __init__(self, run: RunFolder, attempt: int, started: RankProcesses, ranks: Ranks, stop: StopCheck) -> None:
        self._run, self._attempt, self._started, self._stop = run, attempt, started, stop
        self._rank, self._world = ranks.rank, ranks.world
        self._folder = run.attempt_folder(attempt)
        self._reason: StopReason | None = None
        self._look_seconds = look_seconds(ranks.world, is_first=ranks.local_rank == 0)
        self._kills = memory_kills()
        self._escalation = Escalation(run, attempt=attempt, world=ranks.world, say=say)
        self._ended_here = self._others_hang = False
        self._begin = time.time()

    def to_end(self) -> int:
        """Wait until the worker ends, and make sure that its reason is recorded. Returns its exit code."""
        end: float | None = None
        look_at = 0.0
        while running := self._started.running():
            if time.monotonic() + _POLL_SECONDS / 2 >= look_at:
                self._stop.look(self._folder)
                names = self._names()
                if STOP_FILE in names:
                    self._pass_on()
                if end is None:
                    end = self._time_to_end(names)
                look_at = time.monotonic() + self._look_seconds
            is_due = self._escalation.is_due(running)
            is_stopped = self._others_hang and process_state(running[self._rank]) in STOPPED
            if is_due or is_stopped or (end is not None and time.monotonic() > end):
                self._ended_here = True
                if self._run.result(self._attempt) is None:
                    # Other ranks hang: note what is known of a worker that does not answer.
                    note_silence(self._run, self._rank, running[self._rank], since=self._begin)
                self._started.end(signal.SIGKILL, seconds=0.0)
                break
            time.sleep(_POLL_SECONDS)
        code = self._started.codes.get(self._rank, -signal.SIGKILL)
        self._stop.look(self._folder)
        self._pass_on()
        self._note(code)
        return code

    def _pass_on(self) -> None:
        if self._reason is None and (reason := read_stop(self._folder)) is not None:
            self._reason = reason
            self._escalation.asked(reason.kind, reason.cause)
            self._started.ask_to_stop(signal.SIGHUP)

    def _names(self) -> set[str]:
        """The names in the attempt's folder: one call of the file system instead of one for each file."""
        with contextlib.suppress(OSError):
            return set(os.listdir(self._folder))
        return set()

    def _time_to_end(self, names: set[str]) -> float | None:
        """The time until which the worker may end by itself, by the names in the attempt's folder; None: any."""
        if "result.json" in names and self._run.result(self._attempt) is not None:
            return time.monotonic() + TEARDOWN_SECONDS
        if self._stop.job.is_hurried or self._nothing_to_save():
            return time.monotonic()
        noted = self._run.failures(self._attempt) if "failures" in names else []
        notes = [note for note in noted if note.rank != self._rank]
        if not notes:
            return None
        if any(note.kind is OutcomeKind.HANG for note in notes):
            self._others_hang = True
            self._started.show_stacks()
            return time.monotonic() + HANG_GRACE_SECONDS
        return time.monotonic() + GRACE_SECONDS

    def _nothing_to_save(self) -> bool:
        """Whether the job must stop and this attempt has not taken a step, so that there is nothing to save."""
        if self._reason is None:
            return False
        status = self._run.known_status()
        return status is not None and status.attempt == self._attempt and status.state == "starting"

    def _note(self, code: int) -> None:
        """Record why the worker ended, if it has not recorded that itself."""
        if self._ended_here and not self._reason:
            return
        if code == 0 and await_result(self._run, self._attempt, self._world, seconds=VISIBLE_SECONDS) is not None:
            return
        is_recorded = any(note.rank == self._rank for note in self._run.failures(self._attempt))
        if is_recorded or self._run.result(self._attempt) is not None:
            return
        note = note_of_exit(self._run, self._attempt, self._rank, code, self._kills.evidence())
        if self._reason is not None and code < 0:
            cause = f"{self._reason.cause}; it ended before it could save"
            note = replace(note, kind=self._reason.kind, cause=cause, traceback=None, echo=False)
        self._run.write_failure(note)


def await_result(run: RunFolder, attempt: int, world: int, *, seconds: float = RESULT_SECONDS) -> Outcome | None:
    """The attempt's result, which another process writes; None if it does not appear in time."""
    end = time.monotonic() + seconds
    while (result := run.result(attempt)) is None and time.monotonic() < end:
        time.sleep(look_seconds(world))
    return result


def settle(run: RunFolder, attempt: int, world: int) -> None:
    """Wait until the other ranks have recorded why they ended, at most SETTLE_SECONDS."""
    end = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < end:
        notes = run.failures(attempt)
        primary = [note.ended for note in notes if not note.echo]
        if any(note.kind is OutcomeKind.HANG for note in notes):
            # To find the rank that blocks the others, wait for the records of all ranks.
            primary = []
        if len(notes) == world or (primary and time.time() > max(primary) + 1.0):
            return
        time.sleep(look_seconds(world))
