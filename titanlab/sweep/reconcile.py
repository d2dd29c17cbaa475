"""Finds the state of a run from its files and its scheduler; writes results of runs whose jobs ended without one.

The sources of a result, best first: a rank's own record of why it ended; a scheduler's state that explains the end; a
request to stop or to cancel, also if its signal came too early; an exit code. The scheduler's state is stored beside
every result of its jobs, also if the two disagree.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from titanlab.distributed import judged, read_stop, world_of
from titanlab.errors import ConfigError
from titanlab.launch import (
    UNANSWERED,
    JobKey,
    JobState,
    Launcher,
    MemoryWord,
    States,
    Submission,
    close_dead,
    launcher_named,
    with_progress,
)
from titanlab.records import CannotWriteError, Outcome, OutcomeKind, RunFolder, Status, from_exit, read_hang
from titanlab.sweep.sweep_folder import SweepFolder, jobs_of
from titanlab.system import counted


def silence(states: States) -> str | None:
    """Why a scheduler does not answer; None if all schedulers answer."""
    return next((state.reason for state in states.values() if state.raw == UNANSWERED), None)


def job_states(submitted: Sequence[Submission], sweep: Path) -> States:
    """The state of every job, by its submission's token and its index there; each launcher is asked once."""
    states: dict[JobKey, JobState] = {}
    for kind in dict.fromkeys(submission.launcher for submission in submitted):
        own = [submission for submission in submitted if submission.launcher == kind]
        states.update(launcher_named(kind).states(sweep, own))
    return states


# ACTIVE: states of runs on which a process works. WAITING: states of jobs in the queue. _OVER: states of ended jobs.
ACTIVE = ("starting", "running", "saving")
WAITING = ("pending", "requeued")
_OVER = ("ended", "gone")
_UNKNOWN = JobState(state="unknown")


def state_of(status: Status, result: Outcome | None, submission: Submission | None, job_state: JobState | None) -> str:
    """The state of a run: one of `STATES`, or `queued`. Its files decide, except for what only the scheduler knows.

    Args:
        submission: that of the run's latest job; None: the run has no job.
        job_state: the state of that job; None: the scheduler was not asked.
    """
    word = job_state.state if job_state is not None else None
    may_return = False
    if result is not None and submission is not None:
        # The run may go on: its result is of an earlier job, or its job may soon put itself back into the queue.
        is_earlier = result.ended < submission.created
        may_return = is_earlier or (result.kind.automatic and submission.launch.get("requeue", True))
    if word in WAITING or (word == "unknown" and may_return):
        return "queued"
    if result is not None and not (word == "running" and may_return):
        return "ended"
    if word == "running" and status.state in ("prepared", "ended"):
        return "starting"
    # A job counts as submitted also if the scheduler does not answer.
    is_submitted = submission is not None and word not in _OVER
    return "queued" if status.state == "prepared" and is_submitted else status.state


def standing(run: RunFolder, job: tuple[Submission, int] | None, states: States) -> tuple[str, str | None]:
    """The state of a run for a submission, a retry or a cancellation, and how the run ended.

    Returns:
        `done`, `queued`, `running`, `ended` (with another outcome), or `submit` (it never had a job); and the outcome.
    """
    result, submission, job_state = run.result(), None, None
    if result is not None and result.kind is OutcomeKind.DONE:
        return "done", result.kind.value
    if job is not None:
        # A job in an unknown state may still exist: its run must not be submitted again.
        submission, job_state = job[0], states.get((job[0].token, job[1]), _UNKNOWN)
    state = state_of(run.known_status() or Status(state="prepared"), result, submission, job_state)
    if state == "queued":
        return state, None
    is_unknown = job_state is not None and job_state.state == "unknown" and state in ACTIVE
    if is_unknown or (job_state is not None and job_state.state == "running") or run.is_claimed():
        return "running", None
    if job is None and result is None:
        return "submit", None
    return "ended", result.kind.value if result is not None else None


# If the scheduler reports one of these outcomes, its report counts more than a process's exit code.
_KNOWN = (OutcomeKind.OOM, OutcomeKind.WALLTIME, OutcomeKind.NODE_FAIL)
# Outcomes of runs that were asked to stop.
_ASKED = (OutcomeKind.PREEMPTED, OutcomeKind.WALLTIME, OutcomeKind.CANCELLED)


def reconcile(sweep: SweepFolder, report: Callable[[str], None] = lambda line: None) -> States:
    """Write a result for every run whose job, or whose `titanlab train`, has ended without one.

    Several processes may call it at any time: a run that another process has claimed is skipped.

    Args:
        report: called if results cannot be written, as for another user's runs.

    Returns:
        the states of all jobs, as `job_states` does.
    """
    submitted = sweep.submissions()
    jobs = jobs_of(sweep, submitted)
    close_dead_runs(sweep, jobs)
    if not submitted:
        return {}
    states = job_states(submitted, sweep.path)
    unwritten: dict[str, str] = {}
    for name, (submission, index) in jobs.items():
        state, launcher = states[submission.token, index], launcher_named(submission.launcher)
        run = sweep.run(name)
        try:
            if state.state not in _OVER or not run.path.is_dir():
                continue
            early = _early_end(sweep, run, submission, index, state, launcher)
            result = run.result()
            if early is None and result is not None and _word(state, launcher) in (None, result.scheduler):
                continue
            with run.claim():
                memory = launcher.memory_word(sweep.path, submission, index)
                _record(run, submission, index, state, launcher, memory, early)
        except (CannotWriteError, OSError) as error:
            unwritten[name] = error.rule if isinstance(error, CannotWriteError) else str(error)
        except ConfigError:
            # Another process has claimed the run, or the run's files are damaged; `titanlab status` reports damage.
            continue
    if unwritten:
        name, reason = next(iter(unwritten.items()))
        report(
            f"{counted(len(unwritten), 'run')} ended without a result, and no result can be written: {name} {reason}; "
            "run `titanlab status` as their owner"
        )
    return states


def close_dead_runs(sweep: SweepFolder, jobs: Container[str] = ()) -> None:
    """Write a result for every run without a job whose `titanlab train` has died without one."""
    for run in sweep.runs():
        if run.path.name not in jobs:
            # The files may be damaged, or another user's; `titanlab status` reports this.
            with contextlib.suppress(ConfigError, OSError):
                close_dead(run)


def _early_end(
    sweep: SweepFolder, run: RunFolder, submission: Submission, index: int, state: JobState, launcher: Launcher
) -> str | None:
    """Why a job failed before it began an attempt; None if it has begun one, or if the reason is not known.

    Also None if the run keeps its result: the result is later than the job, or the run is done.
    """
    result = run.result()
    if result is not None and (result.kind is OutcomeKind.DONE or result.ended >= submission.created):
        return None
    if state.state != "ended" or state.never_started or _has_begun(run, submission, index):
        return None
    # A job has not failed if somebody ended it, or if it had nothing to do.
    if launcher.has_scheduler and (launcher.end_of(state) is not None or (state.exit_code or 0) <= 0):
        return None
    return launcher.early_end(sweep.path, submission, index)


def _has_begun(run: RunFolder, submission: Submission, index: int) -> bool:
    """Whether a job has begun an attempt."""
    made_by = run.job(run.newest_attempt()) or {}
    return (made_by.get("token"), made_by.get("index")) == (submission.token, index)


def _word(state: JobState, launcher: Launcher) -> dict[str, Any] | None:
    """The scheduler's entry in result.json; None if there is none."""
    if state.state == "gone":
        return {"job_id": state.job_id, "state": "GONE", "exit_code": None}
    if state.raw is None or not launcher.has_scheduler:
        return None
    return {"job_id": state.job_id, "state": state.raw, "exit_code": state.exit_code}


def _record(
    run: RunFolder,
    submission: Submission,
    index: int,
    state: JobState,
    launcher: Launcher,
    memory: MemoryWord | None,
    early: str | None,
) -> None:
    attempt, result = run.newest_attempt(), run.result()
    if not _has_begun(run, submission, index):
        if result is not None and result.ended < submission.created:
            if early is None:
                return  # The job never began: the result of an earlier job stays.
            result = None
        attempt = 0
    outcome = result or with_progress(run, _judged(run, attempt, state, launcher, early))
    end = launcher.end_of(state)
    if end is not None and end.kind is OutcomeKind.NODE_FAIL and outcome.kind in _ASKED:
        # Ranks on other nodes recorded a request to stop: they could not know that a node had failed.
        outcome = replace(outcome, kind=OutcomeKind.NODE_FAIL)
    if end is not None and end.kind in _KNOWN and outcome.kind is OutcomeKind.CRASH and not _says_why(outcome):
        # The outcome was written before the scheduler knew the reason.
        outcome = replace(outcome, kind=end.kind, cause=end.cause, echo=False)
    if result is not None and outcome.kind.automatic and (cancelled_by := run.asked_to_cancel()) is not None:
        # The job was cancelled between its requeue and its next attempt: the result is that of the earlier attempt.
        outcome = replace(outcome, kind=OutcomeKind.CANCELLED, cause=f"{cancelled_by} before it went on")
    is_oom = outcome.kind is OutcomeKind.OOM
    # Keep an OOM outcome with a traceback: its process ran out of memory before the scheduler killed anything.
    if memory is not None and attempt and not (outcome.traceback is not None if is_oom else _says_why(outcome)):
        rank = memory.rank if memory.rank is not None else outcome.rank if is_oom else None
        cause = f"{outcome.cause if is_oom else 'killed for want of memory'}; {memory.said}"
        outcome = replace(outcome, kind=OutcomeKind.OOM, cause=cause, rank=rank, traceback=None, echo=False)
    run.write_result(replace(outcome, scheduler=_word(state, launcher)))


def _judged(run: RunFolder, attempt: int, state: JobState, launcher: Launcher, early: str | None) -> Outcome:
    """The outcome of an attempt that recorded none.

    Args:
        early: why the job failed before it began the attempt; None: the attempt has begun, or the reason is not known.
    """
    cancelled_by = run.asked_to_cancel()
    is_unstarted = attempt == 0 and state.state == "ended" and state.never_started
    if is_unstarted and (unstarted := launcher.end_in_queue(state)) is not None:
        cause = unstarted.cause
        if unstarted.kind is OutcomeKind.CANCELLED and cancelled_by is not None:
            cause = f"{cancelled_by} before it started"
        return Outcome(kind=unstarted.kind, cause=cause, attempt=0)
    notes, code = run.failures(attempt), state.exit_code
    noted = judged(notes, world_of(run, attempt), read_hang(run, attempt)[0]) if notes else None

    def ended(kind: OutcomeKind, cause: str) -> Outcome:
        return Outcome(kind=kind, cause=cause, attempt=attempt, exit_code=code)

    if noted is not None and _says_why(noted):
        return noted
    if (end := launcher.end_of(state)) is not None:
        return ended(end.kind, end.cause)
    if (reason := read_stop(run.attempt_folder(attempt))) is not None:
        return ended(reason.kind, f"{reason.cause}; it ended before it had saved")
    if cancelled_by is not None:
        # Also if the signal killed the process before the process had installed a handler, the run is cancelled.
        return ended(OutcomeKind.CANCELLED, f"{cancelled_by}; it ended before it had saved")
    if noted is not None:
        return noted
    if state.state == "gone":
        cause = "the job has vanished: neither the queue nor the accounting knows it, and it left no result"
        return Outcome(kind=OutcomeKind.NODE_FAIL, cause=cause, attempt=attempt)
    if attempt == 0 and early is not None:
        return ended(OutcomeKind.CRASH, early)
    if code or state.raw is None or launcher.has_scheduler:
        return from_exit(code or 0, attempt=attempt)
    cause = "its processes ended, or were killed, and left no result; logs/ and the sweep's jobs/ say more"
    return Outcome(kind=OutcomeKind.CRASH, cause=cause, attempt=attempt)


def _says_why(outcome: Outcome) -> bool:
    """Whether an outcome says more than an exit code, and is not a consequence of another rank's failure."""
    return not outcome.echo and (outcome.traceback is not None or outcome.kind is not OutcomeKind.CRASH)
