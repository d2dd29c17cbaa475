"""Every job that has ended has a result: runs that recorded none get one from what is left of them.

A rank that could still say why it ended is believed first, then a word of the scheduler's that says why, then the wish
to stop that the job had got, or was to get, then an exit code. What the scheduler says is kept beside every result of
its jobs, also where it disagrees.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from titanlab.distributed.silence import judged
from titanlab.errors import ConfigError
from titanlab.launch.attempt import with_progress, world_of
from titanlab.launch.slurm import REFUSED
from titanlab.records.claim import CannotWriteError
from titanlab.records.outcome import Outcome, OutcomeKind, from_exit
from titanlab.records.run_folder import RunFolder
from titanlab.sweep.job.wish import read_wish
from titanlab.sweep.queue import JobState, job_states
from titanlab.sweep.slurm_words import MemoryWord, memory_word
from titanlab.sweep.submission import Submission
from titanlab.sweep.sweep_folder import SweepFolder, jobs_of
from titanlab.terminal.numerals import counted

_OVER = ("ended", "gone")
# Slurm's words that say why by themselves.
_WORDS: Mapping[str, tuple[OutcomeKind, str]] = {
    "TIMEOUT": (OutcomeKind.WALLTIME, "the job's time limit was reached before it could save"),
    "DEADLINE": (OutcomeKind.WALLTIME, "the job's deadline was reached before it could save"),
    "NODE_FAIL": (OutcomeKind.NODE_FAIL, "a node of the job failed"),
    "BOOT_FAIL": (OutcomeKind.NODE_FAIL, "a node of the job could not be started"),
    "OUT_OF_MEMORY": (OutcomeKind.OOM, "the job had more memory than it was given"),
    "CANCELLED": (OutcomeKind.CANCELLED, "the job was cancelled"),
    "PREEMPTED": (OutcomeKind.PREEMPTED, "the job was preempted before it could save"),
    "REVOKED": (OutcomeKind.CANCELLED, "the job was revoked"),
}
_LOST = ("NODE_FAIL", "BOOT_FAIL")
# Ends that Slurm knows better than whoever has seen no more than an exit code.
_KNOWN = (OutcomeKind.OOM, OutcomeKind.WALLTIME, OutcomeKind.NODE_FAIL)
# Ends of runs that were told to stop.
_ASKED = (OutcomeKind.PREEMPTED, OutcomeKind.WALLTIME, OutcomeKind.CANCELLED)


def reconcile(
    sweep: SweepFolder, report: Callable[[str], None] = lambda line: None
) -> Mapping[tuple[str, int], JobState]:
    """Give a result to every run whose job has ended without one.

    Safe to call at any time, by several processes at once: a run that somebody works on is left alone.

    Args:
        report: told of runs whose results cannot be written, as when they are another person's.

    Returns:
        where all jobs stand, by token and index.
    """
    submitted = sweep.submissions()
    if not submitted:
        return {}
    states = job_states(submitted, sweep.path)
    unwritten: dict[str, str] = {}
    for name, (submission, index) in jobs_of(sweep, submitted).items():
        state = states[submission.token, index]
        run = sweep.run(name)
        try:
            if state.state not in _OVER or not run.path.is_dir() or _settled(run, state):
                continue
            with run.claim():
                _record(run, submission, index, state, _memory_word(sweep, submission, index))
        except (CannotWriteError, OSError) as error:
            unwritten[name] = error.rule if isinstance(error, CannotWriteError) else str(error)
        except ConfigError:
            # In the hands of somebody: it is being recorded, or has begun again. Or its files are damaged: the table
            # says so.
            continue
    if unwritten:
        name, reason = next(iter(unwritten.items()))
        report(
            f"{counted(len(unwritten), 'run')} ended without a result, and none can be noted: {name} {reason}; "
            "their owner's `titanlab status` does"
        )
    return states


def _settled(run: RunFolder, state: JobState) -> bool:
    result = run.result()
    return result is not None and _word(state) in (None, result.scheduler)


def _word(state: JobState) -> dict[str, Any] | None:
    """What result.json keeps of the scheduler; None on this host, where there is none."""
    if state.state == "gone":
        return {"job_id": state.job_id, "state": "GONE", "exit_code": None}
    if state.raw is None or not state.raw.isupper():
        return None
    return {"job_id": state.job_id, "state": state.raw, "exit_code": state.exit_code}


def _memory_word(sweep: SweepFolder, submission: Submission, index: int) -> MemoryWord | None:
    if submission.launcher != "slurm":
        return None
    return memory_word(sweep.jobs, f"{submission.job_id}_{index}")


def _record(run: RunFolder, submission: Submission, index: int, state: JobState, memory: MemoryWord | None) -> None:
    attempt, result = max(run.attempts(), default=0), run.result()
    made_by = run.job(attempt) or {}
    if (made_by.get("token"), made_by.get("index")) != (submission.token, index):
        if result is not None and result.ended < submission.created:
            return  # The job never began: what an earlier one came to stands.
        attempt = 0
    outcome = result or with_progress(run, _judged(run, attempt, state))
    if state.raw in _LOST and outcome.kind in _ASKED:
        # Its ranks on other nodes were told to stop, and could not know more.
        outcome = replace(outcome, kind=OutcomeKind.NODE_FAIL)
    word = _WORDS.get(state.raw or "")
    if word is not None and word[0] in _KNOWN and outcome.kind is OutcomeKind.CRASH and not _says_why(outcome):
        # Whoever wrote that was faster than Slurm.
        outcome = replace(outcome, kind=word[0], cause=word[1], echo=False)
    if memory is not None and attempt and (outcome.kind is OutcomeKind.OOM or not _says_why(outcome)):
        outcome = _with_memory_word(outcome, memory)
    run.write_result(replace(outcome, scheduler=_word(state)))


def _with_memory_word(outcome: Outcome, memory: MemoryWord) -> Outcome:
    """The outcome of a job that Slurm has killed for its memory, with its own sentence."""
    if outcome.traceback is not None and outcome.kind is OutcomeKind.OOM:
        return outcome  # It failed for want of memory before Slurm had to act.
    known = outcome.cause if outcome.kind is OutcomeKind.OOM else "killed for want of memory"
    rank = memory.rank if memory.rank is not None else outcome.rank if outcome.kind is OutcomeKind.OOM else None
    cause = f"{known}; Slurm says: {memory.said}"
    return replace(outcome, kind=OutcomeKind.OOM, cause=cause, rank=rank, traceback=None, echo=False)


def _judged(run: RunFolder, attempt: int, state: JobState) -> Outcome:
    """The outcome of an attempt that recorded none."""
    if attempt == 0 and state.state == "ended" and state.never_started:
        unstarted = _unstarted(run, state)
        if unstarted is not None:
            return unstarted
    notes = run.failures(attempt)
    told = judged(notes, world_of(run, attempt)) if notes else None
    code = state.exit_code
    if told is not None and _says_why(told):
        return told
    wish = read_wish(run.attempt_folder(attempt))
    if (word := _WORDS.get(state.raw or "")) is not None:
        return _plain(*word, attempt, code)
    if wish is not None:
        return _plain(wish.kind, f"{wish.cause}; it ended before it had saved", attempt, code)
    if (asked := run.asked_to_cancel()) is not None:
        # Also one that died of the signal before it could hear it.
        return _plain(OutcomeKind.CANCELLED, f"{asked}; it ended before it had saved", attempt, code)
    if told is not None:
        return told
    if state.state == "gone":
        cause = "the job has vanished: neither the queue nor the accounting knows it, and it left no result"
        return _plain(OutcomeKind.NODE_FAIL, cause, attempt, None)
    if code:
        return from_exit(code, attempt=attempt)
    if state.raw is not None and not state.raw.isupper():
        cause = "its processes ended, or were killed, and left no result; logs/ and the sweep's jobs/ say more"
        return _plain(OutcomeKind.CRASH, cause, attempt, None)
    return from_exit(0, attempt=attempt)


def _unstarted(run: RunFolder, state: JobState) -> Outcome | None:
    """The outcome of a job that ended in the queue, where Slurm's word says enough."""
    if state.raw in ("CANCELLED", "REVOKED"):
        who = run.asked_to_cancel() or "the job was cancelled"
        return _plain(OutcomeKind.CANCELLED, f"{who} before it started", 0, None)
    if state.raw == "DEADLINE":
        return _plain(OutcomeKind.WALLTIME, "the job's deadline passed before it started", 0, None)
    if state.raw == "FAILED":
        # Of a job that no node of the cluster can ever run.
        kind = OutcomeKind.INFEASIBLE if state.reason == REFUSED else OutcomeKind.CRASH
        return _plain(kind, f"Slurm failed the job before it started: {state.reason or 'it gives no reason'}", 0, None)
    return None


def _says_why(outcome: Outcome) -> bool:
    """Whether it is more than an exit code, or an echo of another rank's end."""
    return not outcome.echo and (outcome.traceback is not None or outcome.kind is not OutcomeKind.CRASH)


def _plain(kind: OutcomeKind, cause: str, attempt: int, code: int | None) -> Outcome:
    return Outcome(kind=kind, cause=cause, attempt=attempt, exit_code=code)
