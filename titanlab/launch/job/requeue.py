"""A job puts itself back into the queue if the run did not cause its end."""

from __future__ import annotations

from titanlab.launch.job.job import Job, say
from titanlab.records.outcome import Outcome, OutcomeKind


def requeue_after(job: Job, outcome: Outcome, *, has_saved: bool) -> None:
    """Put a job that was preempted or reached its time limit back into the queue, to resume from the checkpoint."""
    if not job.launcher.can_requeue or outcome.kind not in (OutcomeKind.PREEMPTED, OutcomeKind.WALLTIME):
        return
    if outcome.kind is OutcomeKind.WALLTIME and not has_saved:
        say("not put back into the queue: this attempt has saved nothing, and the next one would not either")
    else:
        requeue(job)


def requeue(job: Job) -> None:
    """Put a job back into the queue, if its config allows it."""
    launch = job.launch
    if not launch.get("requeue", False):
        say("not put back into the queue: launch.requeue=false")
    elif job.place.restart >= launch.get("max_requeues", 0):
        say(f"not put back into the queue: it has been {job.place.restart} times (launch.max_requeues)")
    else:
        refused = job.launcher.requeue(job.place)
        say(f"not put back into the queue: {refused}" if refused else "put back into the queue")
