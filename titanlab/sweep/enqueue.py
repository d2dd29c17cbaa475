"""Runs into queues: one array for each shape, under a token by which its jobs are found again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from types import ModuleType
from typing import Any

from titanlab.errors import ConfigError
from titanlab.launch.shape import Shape
from titanlab.options import implementation, schema_of
from titanlab.records.claim import claimed
from titanlab.sweep import snapshot
from titanlab.sweep.submission import Submission, drop_submission, write_submission
from titanlab.sweep.sweep_folder import SweepFolder
from titanlab.terminal.numerals import counted

# Held by every call of sbatch, which may outlive the process that made it.
_LOCK = ".sbatch"
_PATIENCE_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True)
class Item:
    """A run to be put into a queue.

    Attributes:
        run: the name of its folder.
        shape: what its job takes.
        launch: the launcher's config.
    """

    run: str
    shape: Shape
    launch: Any


def check_jobs(jobs: Sequence[tuple[Any, Shape]], *, submits: bool = True) -> None:
    """Ask each launcher whether it can take its jobs, all at once.

    Args:
        jobs: the launcher's config and the shape of each.
        submits: the launcher has to be here; else it is asked only if it is.

    Raises:
        ConfigError: it cannot.
    """
    by_launcher: dict[str, list[tuple[Any, Shape]]] = {}
    for launch, shape in jobs:
        by_launcher.setdefault(launch.kind, []).append((launch, shape))
    for group in by_launcher.values():
        launcher = implementation(group[0][0])
        if hasattr(launcher, "check") and (submits or launcher.is_here()):
            launcher.check(group)


def silent_launcher(launches: Iterable[Any]) -> str | None:
    """Why a launcher that is installed here does not answer, in a line; None if all do.

    Args:
        launches: configs of launchers.
    """
    for launcher in {launch.kind: implementation(launch) for launch in launches}.values():
        if hasattr(launcher, "silence") and launcher.is_here() and (problem := launcher.silence()) is not None:
            return f"the scheduler does not answer: {problem}"
    return None


def enqueue(folder: SweepFolder, items: Sequence[Item], report: Callable[[str], None]) -> list[Submission]:
    """Submit runs whose folders are there. The caller holds the sweep.

    Raises:
        ConfigError: a launcher refuses; what was submitted before that is in its queue, the rest is as it was.
    """
    if not items:
        return []
    folder.jobs.mkdir(exist_ok=True)
    code = snapshot.take(folder.code).relative_to(folder.path)
    made = []
    for group in arrays(items):
        first, runs = group[0], [folder.run(item.run) for item in group]
        for run in runs:
            run.withdraw_cancel()
        submission = Submission(
            launcher=first.launch.kind,
            # Later than its runs' folders, whose maker's clock may be ahead of this one.
            created=max([time.time(), *(run.created() or 0.0 for run in runs)]),
            code=code.as_posix(),
            shape=first.shape,
            launch=asdict(first.launch),
            runs=tuple(run.path.name for run in runs),
        )
        if first.launch.kind == "local":
            # The file itself is the queue, which the supervisor reads.
            submission = replace(submission, state="submitted", job_id=submission.token)
            write_submission(folder.path, submission)
        else:
            write_submission(folder.path, submission)
            submission = _asked_for(folder, submission, first.launch, report)
        report(f"job {submission.job_id}: {_told(submission)}")
        made.append(submission)
    return made


def settle(folder: SweepFolder, report: Callable[[str], None]) -> None:
    """Finish what a process that was killed has begun: intents whose jobs are in the queue, and those without any.

    Raises:
        ConfigError: a launcher does not tell.
    """
    for submission in folder.submissions():
        if submission.state == "intent":
            found = _settled(folder, submission)
            end = f"is job {found.job_id}" if found else "came to nothing"
            report(f"an interrupted submission {end}: {_told(submission)}")


def job_command(folder: SweepFolder, submission: Submission, index: int | None = None) -> list[str]:
    """What each task of a job runs, as words for the interpreter; without an index it finds its own."""
    # -P: a clone that happens to be the current folder must not win over the snapshot.
    words = ["-P", "-m", "titanlab.sweep.job.task", str(folder.path), submission.token]
    return words if index is None else [*words, str(index)]


def job_environment(folder: SweepFolder, submission: Submission) -> dict[str, str]:
    """Variables of a job's processes: those that lead to its code."""
    return snapshot.environment(folder.path / submission.code)


def launcher_of(submission: Submission) -> ModuleType:
    """The module of the launcher that a submission went to."""
    return implementation(schema_of("launch", submission.launcher)())


def _asked_for(folder: SweepFolder, submission: Submission, launch: Any, report: Callable[[str], None]) -> Submission:
    launcher = implementation(launch)
    array = launcher.Array(
        name=submission.job_name(folder.name),
        count=len(submission.runs),
        command=job_command(folder, submission),
        environment=job_environment(folder, submission),
        folder=folder.jobs,
        guard=(folder.path / "submissions" / f"{submission.token}.json", folder.path / _LOCK),
    )
    try:
        job_id = launcher.submit(launch, submission.shape, array)
    except ConfigError:
        # It may have been taken all the same: an answer that comes too late is an error as well.
        found = _settled(folder, submission)
        if found is None:
            raise
        return found
    submission = replace(submission, state="submitted", job_id=job_id)
    write_submission(folder.path, submission)
    return submission


def _settled(folder: SweepFolder, submission: Submission) -> Submission | None:
    """The submission with the number of its jobs; None, and it is forgotten, if there are none."""
    # A call that the killed process has left behind ends first, or finds its intent gone.
    with claimed(folder.path, "sweep", patience_seconds=_PATIENCE_SECONDS, file=_LOCK):
        job_id = launcher_of(submission).find(submission.token, since=submission.created)
        if job_id is None:
            drop_submission(folder.path, submission)
            return None
        submission = replace(submission, state="submitted", job_id=job_id)
        write_submission(folder.path, submission)
        return submission


def arrays(items: Sequence[Item], *, answered: bool = True) -> Iterator[list[Item]]:
    """Runs whose jobs are asked for in the same words, as many as an array takes, in the order of each first.

    Args:
        answered: the launchers can be asked how many an array takes; else it is what none of them exceeds.
    """
    groups: dict[str, list[Item]] = {}
    for item in items:
        key = json.dumps([asdict(item.shape), asdict(item.launch)], sort_keys=True, default=str)
        groups.setdefault(key, []).append(item)
    most_of: dict[str, int] = {}
    for group in groups.values():
        kind, launcher = group[0].launch.kind, implementation(group[0].launch)
        if kind not in most_of and hasattr(launcher, "max_array"):
            most_of[kind] = launcher.max_array() if answered else launcher.MAX_ARRAY
        elif kind not in most_of:
            most_of[kind] = len(items)
        most = most_of[kind]
        yield from (group[first : first + most] for first in range(0, len(group), most))


def _told(submission: Submission) -> str:
    shape, runs = submission.shape, len(submission.runs)
    nodes = f" on {shape.nodes} nodes" if shape.nodes > 1 else ""
    return f"{counted(runs, 'run')} of {counted(shape.processes, 'process', 'processes')}{nodes}"
