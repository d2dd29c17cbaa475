"""The end of a sweep's jobs, asked for by a person: what runs saves and ends, what waits does not start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from titanlab.errors import ConfigError
from titanlab.launch.launchers import launcher_named
from titanlab.launch.submission import Submission
from titanlab.records.outcome import Outcome, OutcomeKind
from titanlab.records.run_folder import RunFolder
from titanlab.sweep.enqueue import settle
from titanlab.sweep.queue import silence
from titanlab.sweep.reconcile import reconcile
from titanlab.sweep.standing import standing
from titanlab.sweep.sweep_folder import SweepFolder, jobs_of, readable

_CAUSE = "cancelled before it started"


@dataclass
class Cancelled:
    """What came of it, by names of runs.

    Attributes:
        told: they run, and were told to save and end.
        waited: they were in a queue, and are out of it.
        left: they had ended.
    """

    told: list[str] = field(default_factory=list)
    waited: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def cancel(folder: SweepFolder, report: Callable[[str], None], *, names: Sequence[str] = ()) -> Cancelled:
    """Cancel runs of a sweep, or all of it.

    Args:
        report: told, line by line, what is not as it should be.
        names: of runs; none: all.

    Raises:
        ConfigError: there are no such runs, or their launcher does not answer.
    """
    done = Cancelled()
    with folder.claim():
        settle(folder, report)
        jobs, states = jobs_of(folder, folder.submissions()), reconcile(folder)
        if (problem := silence(states)) is not None:
            report(problem)
        # By launcher, and whether they have time to save.
        jobs_to_end: dict[tuple[str, bool], list[tuple[Submission, int]]] = {}
        for run in readable(folder.find(names), report, named=bool(names)):
            name, job = run.path.name, jobs.get(run.path.name)
            word, _ = standing(run, job, states)
            if word in ("done", "ended"):
                done.left.append(name)
                continue
            (done.told if word == "running" else done.waited).append(name)
            # A person who asks a second time does not want to wait.
            is_gentle = word == "running" and run.asked_to_cancel() is None
            # First the request, then the signal: the process that gets the signal reads the request.
            run.ask_to_cancel()
            if job is not None:
                jobs_to_end.setdefault((job[0].launcher, is_gentle), []).append(job)
        for (kind, is_gentle), to_end in jobs_to_end.items():
            launcher_named(kind).cancel(folder.path, to_end, report, is_gentle=is_gentle)
        for name in list(done.waited):
            if not _note_end(folder.run(name)):
                # It has started just now, and writes its own end.
                done.waited.remove(name)
                done.told.append(name)
    return done


def _note_end(run: RunFolder) -> bool:
    """Write the result of a run that waited. Returns whether it still did."""
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
