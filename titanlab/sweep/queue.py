"""The states of a sweep's jobs, according to their launchers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from titanlab.launch.contract import UNANSWERED, JobKey, JobState, States
from titanlab.launch.launchers import launcher_named
from titanlab.launch.submission import Submission


def silence(states: States) -> str | None:
    """Why the scheduler of some jobs does not answer; None if all answer."""
    return next((state.reason for state in states.values() if state.raw == UNANSWERED), None)


def job_states(submitted: Sequence[Submission], sweep: Path) -> States:
    """The state of every job, by token and index; each launcher is asked once.

    Args:
        sweep: the folder of the submissions.
    """
    by_launcher: dict[str, list[Submission]] = {}
    for submission in submitted:
        by_launcher.setdefault(submission.launcher, []).append(submission)
    states: dict[JobKey, JobState] = {}
    for kind, own in by_launcher.items():
        states.update(launcher_named(kind).states(sweep, own))
    return states
