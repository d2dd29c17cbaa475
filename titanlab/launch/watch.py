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
import sys
import threading
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from titanlab.data import source
from titanlab.distributed import (
    ANSWER_SECONDS,
    LOG,
    STOP_FILE,
    STOP_SIGNALS,
    Ranks,
    check_host,
    look_seconds,
    note_silence,
    read_stop,
    this_host,
    write_stop,
)
from titanlab.launch.attempt import keep_tokenizer, note_of_exit
from titanlab.launch.contract import Launcher, ProcessPlace
from titanlab.launch.evidence import memory_kills
from titanlab.launch.processes import Escalation, RankProcesses, start_worker
from titanlab.recipe import Recipe
from titanlab.records import KillEvidence, Outcome, OutcomeKind, RunFolder, StopReason, from_exception
from titanlab.system import STOPPED, process_state

if TYPE_CHECKING:
    from titanlab.launch.job import Job, Rendezvous


def say(text: str) -> None:
    """Print a line to the log of this task."""
    with contextlib.suppress(OSError):
        sys.stdout.write(f"{time.strftime('%H:%M:%S')}  {text}\n")
        sys.stdout.flush()


def ignore_stop_signals() -> None:
    """In a new worker: ignore a scheduler's signals, which the watch handles; block SIGHUP until it has a handler."""
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
    if cancelled_by is not None:
        return StopReason(kind=OutcomeKind.CANCELLED, cause=f"{cancelled_by}; the run can be resumed")
    if number == signal.SIGINT:
        return StopReason(kind=OutcomeKind.CANCELLED, cause="interrupted by SIGINT; the run can be resumed")
    if number == signal.SIGXCPU:
        return StopReason(kind=OutcomeKind.WALLTIME, cause="its limit of CPU time is used up (SIGXCPU)")
    return launcher.stop_reason(signal.Signals(number).name, place, signal_seconds=signal_seconds)


# After another rank's failure, a worker has this time to record its own state; after a hang also to write its stacks.
GRACE_SECONDS = 5.0
HANG_GRACE_SECONDS = ANSWER_SECONDS
# A worker has this time to end after the result is on disk.
TEARDOWN_SECONDS = 30.0
# On a shared file system, files of other nodes may appear this much later.
SETTLE_SECONDS = 10.0
RESULT_SECONDS = 120.0
VISIBLE_SECONDS = 2.0


class RankWatch:
    """Watches one rank's worker in one attempt."""

    def __init__(self, run: RunFolder, attempt: int, started: RankProcesses, ranks: Ranks, stop: StopCheck) -> None:
        self._run, self._attempt, self._started, self._stop = run, attempt, started, stop
        self._ranks, self._folder = ranks, run.attempt_folder(attempt)
        self._escalation = Escalation(run, attempt=attempt, world=ranks.world, say=say)
        self._reason: StopReason | None = None
        self._is_ending = False

    def to_end(self) -> int:
        """Wait until the worker ends, and make sure that the reason is recorded. Returns its exit code."""
        run, rank, kills, begin = self._run, self._ranks.rank, memory_kills(), time.time()
        seconds = look_seconds(self._ranks.world, is_first=self._ranks.local_rank == 0)
        self._started.watch(self._escalation, self._look, seconds=seconds)
        if running := self._started.running():
            if run.result(self._attempt) is None:
                # Other ranks hang: note what is known of a worker that does not answer.
                note_silence(run, rank, running[rank], since=begin)
            self._started.end(signal.SIGKILL, seconds=0.0)
        code = self._started.codes.get(rank, -signal.SIGKILL)
        self._stop.look(self._folder)
        self._pass_on()
        # Record nothing for a worker that was killed here, unless there is a reason to stop for all ranks.
        if self._reason or not running:
            self._note(code, kills.evidence())
        return code

    def _look(self) -> float | None:
        """Look for a reason to stop, and for the end of other ranks. Returns the time that the worker still has."""
        self._stop.look(self._folder)
        names: set[str] = set()
        with contextlib.suppress(OSError):
            # One call of the file system instead of one for each file.
            names = set(os.listdir(self._folder))
        if STOP_FILE in names:
            self._pass_on()
        limit = None if self._is_ending else self._seconds_left(names)
        self._is_ending |= limit is not None
        return limit

    def _seconds_left(self, names: set[str]) -> float | None:
        """How long the worker may still run, by the names in the attempt's folder; None: any time."""
        run, attempt, rank = self._run, self._attempt, self._ranks.rank
        if "result.json" in names and run.result(attempt) is not None:
            return TEARDOWN_SECONDS
        if self._stop.job.is_hurried:
            return 0.0
        if self._reason is not None:
            status = run.known_status()
            if status is not None and status.attempt == attempt and status.state == "starting":
                # There is nothing to save.
                return 0.0
        notes = [note for note in run.failures(attempt) if note.rank != rank] if "failures" in names else []
        if any(note.kind is OutcomeKind.HANG for note in notes):
            # A worker that SIGSTOP has stopped cannot record where it is.
            return 0.0 if process_state(self._started.pids[rank]) in STOPPED else HANG_GRACE_SECONDS
        return GRACE_SECONDS if notes else None

    def _pass_on(self) -> None:
        if self._reason is None and (reason := read_stop(self._folder)) is not None:
            self._reason = reason
            self._escalation.asked(reason.kind, reason.cause)
            self._started.ask_to_stop(signal.SIGHUP)

    def _note(self, code: int, memory: KillEvidence | None) -> None:
        """Record why the worker ended, if it has not recorded that itself."""
        run, attempt, rank = self._run, self._attempt, self._ranks.rank
        if code == 0 and await_result(run, attempt, self._ranks.world, seconds=VISIBLE_SECONDS) is not None:
            return
        if any(note.rank == rank for note in run.failures(attempt)) or run.result(attempt) is not None:
            return
        note = note_of_exit(run, attempt, rank, code, memory)
        if self._reason is not None and code < 0:
            cause = f"{self._reason.cause}; it ended before it could save"
            note = replace(note, kind=self._reason.kind, cause=cause, traceback=None, echo=False)
        run.write_failure(note)


def await_result(
    run: RunFolder, attempt: int, world: int, *, seconds: float = RESULT_SECONDS, while_claimed: bool = False
) -> Outcome | None:
    """The attempt's result, which another process writes; None if it does not appear in time.

    Args:
        while_claimed: the time begins when no process has claimed the run any more.
    """
    end = time.monotonic() + seconds
    while (result := run.result(attempt)) is None and time.monotonic() < end:
        if while_claimed and run.is_claimed():
            end = time.monotonic() + seconds
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


def ranks_in(ranks: Ranks, meeting: Rendezvous) -> Ranks:
    """The rank of a process in an attempt. Its local rank stays the same, and so does its device."""
    met = replace(ranks, address=meeting.address, port=meeting.port)
    if not meeting.members:
        return met
    return replace(met, rank=meeting.members.index(ranks.rank), world=len(meeting.members))


def watched(job: Job, recipe: Recipe, meeting: Rendezvous, stop: StopCheck) -> int:
    """Run this rank's worker until it ends. Returns its exit code; if it failed, the reason is recorded."""
    run, ranks = job.run, ranks_in(job.place.ranks, meeting)
    try:
        job.check_code()
        cluster = recipe.cluster
        check_host(
            this_host(),
            accelerator=cluster.accelerator,
            device=cluster.device,
            processes=ranks.local_world,
            has_own_gpu=ranks.has_own_gpu,
        )
        if job.leads:
            source.prepare(recipe.data, report=say)
            keep_tokenizer(run, recipe)
        log = {LOG: str(run.logs / f"rank-{ranks.rank}.log")}
        config = run.config(meeting.attempt)
        worker = start_worker(
            run.path, ranks, meeting.attempt, config=config, variables=log, set_up=ignore_stop_signals
        )
    except Exception as error:
        note = from_exception(error, rank=ranks.rank, attempt=meeting.attempt)
        run.write_failure(note)
        if note.traceback:
            traceback.print_exception(error)
        return note.exit_code or 1
    return RankWatch(run, meeting.attempt, RankProcesses({ranks.rank: worker}), ranks, stop).to_end()
