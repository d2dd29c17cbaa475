"""Cancels the jobs of a sweep: running jobs save and end, waiting jobs do not start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from titanlab.errors import ConfigError
from titanlab.launch.launchers import launcher_named
from titanlab.launch.submission import Submission
from titanlab.records.outcome import Outcome, OutcomeKind
from titanlab.records.run_folder import RunFolder
from titanlab.sweep.enqueue import settle, standing
from titanlab.sweep.reconcile import reconcile, silence
from titanlab.sweep.sweep_folder import SweepFolder, jobs_of, readable

_CAUSE = "cancelled before it started"


@dataclass
class Cancelled:
    """The cancelled runs of a sweep, by name.

    Attributes:
        stopping: they run, and were asked to save and end.
        withdrawn: they waited, and were removed from the queue.
        ended: they had ended before.
    """

    stopping: list[str] = field(default_factory=list)
    withdrawn: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)


def cancel(folder: SweepFolder, report: Callable[[str], None], *, names: Sequence[str] = ()) -> Cancelled:
    """Cancel runs of a sweep, or all of it.

    Args:
        report: called with a line for each problem.
        names: of runs; none: all.

    Raises:
        ConfigError: such a run does not exist, or the launcher does not answer.
    """
    cancelled = Cancelled()
    with folder.claim():
        settle(folder, report)
        jobs, states = jobs_of(folder, folder.submissions()), reconcile(folder)
        if (problem := silence(states)) is not None:
            report(problem)
        # Jobs by launcher, and by whether they get time to save.
        jobs_to_end: dict[tuple[str, bool], list[tuple[Submission, int]]] = {}
        for run in readable(folder.find(names), report, named=bool(names)):
            name, job = run.path.name, jobs.get(run.path.name)
            word, _ = standing(run, job, states)
            if word in ("done", "ended"):
                cancelled.ended.append(name)
                continue
            (cancelled.stopping if word == "running" else cancelled.withdrawn).append(name)
            # A user who asks a second time does not want to wait.
            is_gentle = word == "running" and run.asked_to_cancel() is None
            # Write the request before the signal: the process that gets the signal reads the request.
            run.ask_to_cancel()
            if job is not None:
                jobs_to_end.setdefault((job[0].launcher, is_gentle), []).append(job)
        for (kind, is_gentle), to_end in jobs_to_end.items():
            launcher_named(kind).cancel(folder.path, to_end, report, is_gentle=is_gentle)
        for name in list(cancelled.withdrawn):
            if not _record_end(folder.run(name)):
                # It has just started, and records its own end.
                cancelled.withdrawn.remove(name)
                cancelled.stopping.append(name)
    return cancelled


def _record_end(run: RunFolder) -> bool:
    """Write the result of a waiting run. Returns False if it has started meanwhile."""
    try:
        with run.claim():
            status = run.known_status()
            outcome = Outcome(kind=OutcomeKind.CANCELLED, attempt=0, cause=_CAUSE)
            if status is not None:
                outcome = replace(outcome, step=status.step, steps=status.steps)
            run.write_result(outcome)
            return True
    except ConfigError:
        return False
