"""Why jobs ended, according to Slurm's names of job states."""

from __future__ import annotations

from collections.abc import Mapping

from titanlab.launch.contract import JobEnd, JobState
from titanlab.records.outcome import OutcomeKind

# Slurm's sign that a node cannot open the files for a job's output; no process has got this signal.
_NO_LOGS = 53
# The reason that Slurm gives if no node can ever fulfil the request.
REFUSED = "BadConstraints"
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


def end_of(state: JobState) -> JobEnd | None:
    """Why a job ended, if the name of its state alone explains it."""
    if state.exit_code == -_NO_LOGS:
        cause = "Slurm could not write the job's logs on its node (signal 53): do the nodes share the folder of runs?"
        return JobEnd(kind=OutcomeKind.CRASH, cause=cause)
    known = _WORDS.get(state.raw or "")
    return JobEnd(kind=known[0], cause=known[1]) if known is not None else None


def end_in_queue(state: JobState) -> JobEnd | None:
    """Why a job ended that never started, if Slurm's state and reason explain it."""
    if state.raw in ("CANCELLED", "REVOKED"):
        return JobEnd(kind=OutcomeKind.CANCELLED, cause="the job was cancelled before it started")
    if state.raw == "DEADLINE":
        return JobEnd(kind=OutcomeKind.WALLTIME, cause="the job's deadline passed before it started")
    if state.raw == "FAILED":
        kind = OutcomeKind.INFEASIBLE if state.reason == REFUSED else OutcomeKind.CRASH
        cause = f"Slurm failed the job before it started: {state.reason or 'it gives no reason'}"
        return JobEnd(kind=kind, cause=cause)
    return None
