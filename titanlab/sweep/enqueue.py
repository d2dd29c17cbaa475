"""Puts runs into queues, one array for each shape, with a token that identifies its jobs; and cancels jobs."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from titanlab.distributed import Host, check_host, this_host
from titanlab.errors import ConfigError
from titanlab.launch import (
    HANDING_OVER,
    JobShape,
    LaunchConfig,
    States,
    Submission,
    check_cluster,
    drop_submission,
    launcher_named,
    write_submission,
)
from titanlab.ranges import plain
from titanlab.recipe import Recipe, check_all_but_data, check_host_memory, resolve
from titanlab.records import Outcome, OutcomeKind, RunFolder, claimed
from titanlab.sweep import sweep_folder
from titanlab.sweep.reconcile import reconcile, silence
from titanlab.sweep.sweep_folder import SweepFolder, jobs_of, readable
from titanlab.system import counted

_PATIENCE_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True)
class QueuedRun:
    """A run to be put into a queue.

    Attributes:
        changes: the groups and values of its recipe that the job replaces.
    """

    run: str
    shape: JobShape
    launch: LaunchConfig
    changes: Mapping[str, Any] = field(default_factory=dict)


def checked(recipe: Recipe, here: Callable[[], Host] | None = None, *, elsewhere: bool = False) -> Recipe:
    """The resolved recipe of a job, after every check that needs no data.

    Args:
        here: looks at this host; None: `this_host`.
        elsewhere: the job is not for this host, whose devices and memory do not matter.

    Raises:
        ConfigError: a rule is broken.
    """
    cluster, launch = recipe.cluster, recipe.launch
    if not launch.runs_here:
        # The job will run on other hosts: do not use the devices of this one.
        check_cluster(cluster, launch)
        recipe = resolve(recipe, world=None, accelerator=cluster.accelerator, device=cluster.device or "cpu")
        check_all_but_data(recipe)
        return recipe
    host = (here or this_host)()
    recipe = resolve(recipe, world=None, accelerator=host.accelerator, device=host.device)
    check_all_but_data(recipe)
    if not elsewhere:
        cluster, processes = recipe.cluster, recipe.layout.world
        check_host(host, accelerator=cluster.accelerator, device=cluster.device, processes=processes)
        check_host_memory(recipe, host, processes=processes)
    return recipe


def check_jobs(jobs: Sequence[tuple[LaunchConfig, JobShape]], *, submits: bool = True) -> None:
    """Check that each launcher can take its jobs; without `submits`, skip launchers that are not installed."""
    for kind in dict.fromkeys(launch.kind for launch, _ in jobs):
        launcher = launcher_named(kind)
        if submits or launcher.is_here():
            launcher.check([job for job in jobs if job[0].kind == kind])


def check_folder(folder: Path, launches: Iterable[LaunchConfig]) -> None:
    """Check that no character of the path of a sweep's folder has another meaning for Python or a launcher."""
    meanings = {os.pathsep: "at which PYTHONPATH is split"}
    for kind in dict.fromkeys(launch.kind for launch in launches):
        replaced = launcher_named(kind).replaced_in_paths
        meanings |= dict.fromkeys(replaced, f"which launch={kind} replaces in the paths of logs")
    for character, meaning in meanings.items():
        if character in str(folder):
            cure = "give runs=FOLDER, or the sweep, a path without"
            raise ConfigError("runs", str(folder), f"has {character!r} in it, {meaning}", cure)


def enqueue(folder: SweepFolder, items: Sequence[QueuedRun], report: Callable[[str], None]) -> list[Submission]:
    """Submit runs that have folders, in the order in which they should start. The caller has claimed the sweep.

    Raises:
        ConfigError: a launcher refuses; earlier submissions stay in their queues, later runs are unchanged.
    """
    if not items:
        return []
    check_folder(folder.path, (item.launch for item in items))
    folder.jobs.mkdir(exist_ok=True)
    code = sweep_folder.take_snapshot(folder.code).relative_to(folder.path)
    submitted: list[Submission] = []
    place_of = {item.run: place for place, item in enumerate(items)}
    for group in arrays(items):
        first, runs = group[0], [folder.run(item.run) for item in group]
        for run in runs:
            run.withdraw_cancel()
        submission = Submission(
            launcher=first.launch.kind,
            # Not earlier than its runs' folders: a host whose clock is ahead may have created them.
            created=max([time.time(), *(run.created() or 0.0 for run in runs)]),
            code=code.as_posix(),
            shape=first.shape,
            launch=plain(first.launch),
            runs=tuple(run.path.name for run in runs),
            changes={item.run: item.changes for item in group if item.changes},
            batch=submitted[0].batch if submitted else secrets.token_hex(5),
            places=tuple(place_of[item.run] for item in group),
        )
        write_submission(folder.path, submission)
        try:
            job_id: str | None = first.launch.implementation().submit(folder.path, submission)
        except ConfigError:
            # The jobs may be in the queue nevertheless: a late answer is an error too.
            job_id = _settled(folder, submission)
            if job_id is None:
                raise
        submission = replace(submission, state="submitted", job_id=job_id)
        write_submission(folder.path, submission)
        report(f"job {submission.job_id}: {_described(submission)}")
        submitted.append(submission)
    return submitted


def settle(folder: SweepFolder, report: Callable[[str], None]) -> None:
    """Complete or remove the intents of a process that was killed, by asking the launchers for their jobs."""
    for submission in folder.submissions():
        if submission.state == "intent":
            job_id = _settled(folder, submission)
            end = f"is job {job_id}" if job_id else "came to nothing"
            report(f"an interrupted submission {end}: {_described(submission)}")


def wake(folder: SweepFolder) -> None:
    """Make launchers start the processes that run the sweep's jobs on this host."""
    for kind in dict.fromkeys(submission.launcher for submission in folder.submissions()):
        launcher_named(kind).wake(folder.path)


def _settled(folder: SweepFolder, submission: Submission) -> str | None:
    """Write the number of a submission's jobs into its file, and return it; without jobs, remove the file (None)."""
    # Wait for an sbatch that the killed process left behind; an sbatch that starts later finds its intent removed.
    with claimed(folder.path, "sweep", patience_seconds=_PATIENCE_SECONDS, file=HANDING_OVER):
        job_id = launcher_named(submission.launcher).find(folder.path, submission)
        if job_id is None:
            drop_submission(folder.path, submission)
        else:
            write_submission(folder.path, replace(submission, state="submitted", job_id=job_id))
        return job_id


def arrays(items: Sequence[QueuedRun], *, answered: bool = True) -> Iterator[list[QueuedRun]]:
    """Group runs whose jobs have the same shape and config into arrays of the allowed size, in order of first use.

    Args:
        answered: whether the launchers can be asked for the size of an array; if not, use a size that all accept.
    """
    groups: dict[str, list[QueuedRun]] = {}
    for item in items:
        key = json.dumps([plain(item.shape), plain(item.launch)], sort_keys=True, default=str)
        groups.setdefault(key, []).append(item)
    max_arrays: dict[str, int | None] = {}
    for group in groups.values():
        kind = group[0].launch.kind
        if kind not in max_arrays:
            max_arrays[kind] = launcher_named(kind).max_array(is_answered=answered)
        most = max_arrays[kind] or len(group)
        yield from (group[first : first + most] for first in range(0, len(group), most))


def _described(submission: Submission) -> str:
    shape, runs = submission.shape, len(submission.runs)
    nodes = f" on {shape.nodes} nodes" if shape.nodes > 1 else ""
    return f"{counted(runs, 'run')} of {counted(shape.processes, 'process', 'processes')}{nodes}"


def standing(run: RunFolder, job: tuple[Submission, int] | None, states: States) -> tuple[str, str | None]:
    """What a run is doing, and how it ended.

    Args:
        job: its latest submission, and its index there.
        states: of jobs, by token and index.

    Returns:
        `done`, `queued`, `running`, `ended` (with another outcome), or `submit` (it never had a job); and the outcome.
    """
    result = run.result()
    outcome = result.kind.value if result else None
    if result is not None and result.kind is OutcomeKind.DONE:
        return "done", outcome
    if job is not None:
        submission, index = job
        job_state = states.get((submission.token, index))
        word = job_state.state if job_state else "unknown"
        # For a while the scheduler may not know a job that was cancelled in the queue; then its result counts.
        # After some ends the job may have put itself back into the queue.
        has_result = result is not None and result.ended >= submission.created and not result.kind.automatic
        if word in ("pending", "requeued") or (word == "unknown" and not has_result):
            # The scheduler may still have an unknown job; do not submit it again.
            return "queued", None
        if word == "running":
            return "running", None
    if run.is_claimed():
        return "running", None
    if job is not None or outcome is not None:
        return "ended", outcome
    return "submit", None


def standings(
    folder: SweepFolder, report: Callable[[str], None], names: Sequence[str], *, note: str = ""
) -> Iterator[tuple[RunFolder, tuple[Submission, int] | None, str, str | None]]:
    """Runs with their jobs and standings; first writes results for runs whose jobs have ended without one.

    Args:
        names: of runs; none: all.
        note: for the error: what it means that the scheduler does not answer.
    """
    jobs, states = jobs_of(folder, folder.submissions()), reconcile(folder)
    if (problem := silence(states)) is not None:
        report(problem + note)
    for run in readable(folder.find(names), report, named=bool(names)):
        job = jobs.get(run.path.name)
        yield run, job, *standing(run, job, states)


def supersede(folder: SweepFolder, run: RunFolder) -> None:
    """Move the folder of a run that no process has claimed aside, so that the run can start from the beginning."""
    folder.superseded.mkdir(exist_ok=True)
    with run.claim():
        number = 1
        while (aside := folder.superseded / f"{run.path.name}.{number}").exists():
            number += 1
        run.path.rename(aside)


@dataclass
class Cancelled:
    """The cancelled runs of a sweep, by name.

    Attributes:
        stopping: ran, and were asked to save and end.
        withdrawn: waited, and were removed from the queue.
        ended: had ended before.
    """

    stopping: list[str] = field(default_factory=list)
    withdrawn: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)


def cancel(folder: SweepFolder, report: Callable[[str], None], *, names: Sequence[str] = ()) -> Cancelled:
    """Cancel the named runs of a sweep; without names, all."""
    cancelled = Cancelled()
    with folder.claim():
        settle(folder, report)
        # Jobs by launcher, and by whether they get time to save.
        jobs_to_end: dict[tuple[str, bool], list[tuple[Submission, int]]] = {}
        for run, job, word, _ in standings(folder, report, names):
            name = run.path.name
            if word in ("done", "ended"):
                cancelled.ended.append(name)
                continue
            (cancelled.stopping if word == "running" else cancelled.withdrawn).append(name)
            # A second request means that the user does not want to wait.
            is_gentle = word == "running" and run.asked_to_cancel() is None
            # Write the request before the signal: the process that gets the signal reads the request.
            run.ask_to_cancel()
            if job is not None:
                jobs_to_end.setdefault((job[0].launcher, is_gentle), []).append(job)
        for (kind, is_gentle), to_end in jobs_to_end.items():
            launcher_named(kind).cancel(folder.path, to_end, report, is_gentle=is_gentle)
        for name in list(cancelled.withdrawn):
            run = folder.run(name)
            try:
                with run.claim():
                    status = run.known_status()
                    outcome = Outcome(kind=OutcomeKind.CANCELLED, attempt=0, cause="cancelled before it started")
                    if status is not None:
                        outcome = replace(outcome, step=status.step, steps=status.steps)
                    run.write_result(outcome)
            except ConfigError:
                # The run has just started; it records its own end.
                cancelled.withdrawn.remove(name)
                cancelled.stopping.append(name)
    return cancelled
