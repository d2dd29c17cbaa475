"""Runs into queues: one array for each shape, under a token by which its jobs are found again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from titanlab.errors import ConfigError
from titanlab.launch.contract import LaunchConfig
from titanlab.launch.launchers import launcher_named
from titanlab.launch.shape import Shape
from titanlab.launch.submission import HANDING_OVER, Submission, drop_submission, write_submission
from titanlab.records.claim import claimed
from titanlab.sweep import snapshot
from titanlab.sweep.sweep_folder import SweepFolder
from titanlab.terminal.numerals import counted

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
    launch: LaunchConfig


def check_jobs(jobs: Sequence[tuple[LaunchConfig, Shape]], *, submits: bool = True) -> None:
    """Ask each launcher whether it can take its jobs, all at once.

    Args:
        jobs: the launcher's config and the shape of each.
        submits: the launcher has to be here; else it is asked only if it is.

    Raises:
        ConfigError: it cannot.
    """
    by_launcher: dict[str, list[tuple[LaunchConfig, Shape]]] = {}
    for launch, shape in jobs:
        by_launcher.setdefault(launch.kind, []).append((launch, shape))
    for kind, own in by_launcher.items():
        launcher = launcher_named(kind)
        if submits or launcher.is_here():
            launcher.check(own)


def silent_launcher(launches: Iterable[LaunchConfig]) -> str | None:
    """Why a launcher that is installed here does not answer, in a line; None if all do.

    Args:
        launches: configs of launchers.
    """
    for kind in dict.fromkeys(launch.kind for launch in launches):
        launcher = launcher_named(kind)
        if launcher.is_here() and (problem := launcher.silence()) is not None:
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
            launch=_plain(first.launch),
            runs=tuple(run.path.name for run in runs),
        )
        write_submission(folder.path, submission)
        submission = _submitted(folder, submission, first.launch)
        report(f"job {submission.job_id}: {_described(submission)}")
        made.append(submission)
    return made


def settle(folder: SweepFolder, report: Callable[[str], None]) -> None:
    """Finish what a process that was killed has begun: intents whose jobs are in the queue, and those without any.

    Raises:
        ConfigError: a launcher does not tell.
    """
    for submission in folder.submissions():
        if submission.state == "intent":
            settled = _settled(folder, submission)
            end = f"is job {settled.job_id}" if settled else "came to nothing"
            report(f"an interrupted submission {end}: {_described(submission)}")


def wake(folder: SweepFolder) -> None:
    """Have launchers start what has to run on this host as long as the sweep has jobs."""
    for kind in dict.fromkeys(submission.launcher for submission in folder.submissions()):
        launcher_named(kind).wake(folder.path)


def _submitted(folder: SweepFolder, submission: Submission, launch: LaunchConfig) -> Submission:
    try:
        job_id = launch.implementation().submit(folder.path, submission)
    except ConfigError:
        # It may have been taken all the same: an answer that comes too late is an error as well.
        settled = _settled(folder, submission)
        if settled is None:
            raise
        return settled
    submission = replace(submission, state="submitted", job_id=job_id)
    write_submission(folder.path, submission)
    return submission


def _settled(folder: SweepFolder, submission: Submission) -> Submission | None:
    """The submission with the number of its jobs; None, and it is forgotten, if there are none."""
    # A call that the killed process has left behind ends first, or finds its intent gone.
    with claimed(folder.path, "sweep", patience_seconds=_PATIENCE_SECONDS, file=HANDING_OVER):
        job_id = launcher_named(submission.launcher).find(folder.path, submission)
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
        key = json.dumps([asdict(item.shape), _plain(item.launch)], sort_keys=True, default=str)
        groups.setdefault(key, []).append(item)
    most_of: dict[str, int | None] = {}
    for group in groups.values():
        kind = group[0].launch.kind
        if kind not in most_of:
            most_of[kind] = launcher_named(kind).max_array(is_answered=answered)
        most = most_of[kind] or len(group)
        yield from (group[first : first + most] for first in range(0, len(group), most))


def _plain(launch: LaunchConfig) -> dict[str, Any]:
    """A launcher's config as plain values."""
    config: Any = launch
    return asdict(config)


def _described(submission: Submission) -> str:
    shape, runs = submission.shape, len(submission.runs)
    nodes = f" on {shape.nodes} nodes" if shape.nodes > 1 else ""
    return f"{counted(runs, 'run')} of {counted(shape.processes, 'process', 'processes')}{nodes}"
