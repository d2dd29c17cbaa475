"""Submits the missing runs of a study, each only once, even if this process is killed at any moment.

It writes the run folders, the snapshot of the code and an intent (what it will submit) for each array of jobs, and then
submits the array. If it is killed, the next submission continues from the parts that exist.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from titanlab.checkpoint import parent_of
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
    launch_of,
    launcher_named,
    shape_of,
    write_submission,
)
from titanlab.ranges import plain
from titanlab.recipe import Recipe, check_all_but_data, check_host_memory, resolve, to_mapping
from titanlab.records import RunFolder, check_runs, claimed, create_run
from titanlab.sweep import sweep_folder
from titanlab.sweep.listing import dropped
from titanlab.sweep.reconcile import job_states, reconcile, standing
from titanlab.sweep.rows import estimate_values, estimated
from titanlab.sweep.space import SweepPoint, starting_order
from titanlab.sweep.sweep_folder import SINGLE, SweepFolder, jobs_of
from titanlab.system import aligned, counted, grouped, sweep_argument, trimmed, user_path
from titanlab.train import has_tracker

if TYPE_CHECKING:
    from titanlab.sweep.plan import PlannedRun, Study

_PATIENCE_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True)
class QueuedRun:
    """A run to be put into a queue.

    Attributes:
        changes: the groups and values of the run's config.yaml that the job replaces.
        outcome: the run's outcome until now; None: the run has none.
    """

    run: str
    recipe: Recipe
    changes: Mapping[str, Any] = field(default_factory=dict)
    outcome: str | None = None

    @functools.cached_property
    def shape(self) -> JobShape:
        return shape_of(self.recipe)

    @property
    def launch(self) -> LaunchConfig:
        return launch_of(self.recipe)


@dataclass(frozen=True, kw_only=True)
class Decision(QueuedRun):
    """The action for one run of a study.

    Attributes:
        action: `submit`, `queued`, `running`, `done`, or `ended` (with another outcome: only a retry submits it again).
    """

    planned: PlannedRun
    action: str


class Submitted(NamedTuple):
    """The result of a submission."""

    folder: SweepFolder
    decisions: tuple[Decision, ...]
    submissions: tuple[Submission, ...]


def machine_of(recipe: Recipe, here: Callable[[], Host]) -> tuple[str, str]:
    """The accelerator and the device for which a job is resolved: of this host, or of the cluster on which it runs.

    Raises:
        ConfigError: the cluster does not describe its nodes.
    """
    if recipe.launch.runs_here:
        host = here()
        return host.accelerator, host.device
    check_cluster(recipe.cluster, recipe.launch)
    return recipe.cluster.accelerator, recipe.cluster.device or "cpu"


def check_resolved(recipe: Recipe, here: Callable[[], Host], *, elsewhere: bool = False) -> None:
    """Check a resolved recipe in everything but its data.

    Args:
        elsewhere: the job is not for this host, whose devices and memory do not matter.
    """
    check_all_but_data(recipe)
    if recipe.launch.runs_here and not elsewhere:
        host, cluster, processes = here(), recipe.cluster, recipe.layout.world
        check_host(host, accelerator=cluster.accelerator, device=cluster.device, processes=processes)
        check_host_memory(recipe, host, processes=processes)


def checked(recipe: Recipe) -> Recipe:
    """The resolved recipe of a job, after every check that needs no data.

    Raises:
        ConfigError: a rule is broken.
    """
    here = functools.cache(this_host)
    accelerator, device = machine_of(recipe, here)
    recipe = resolve(recipe, world=None, accelerator=accelerator, device=device)
    check_resolved(recipe, here)
    return recipe


def check_jobs(jobs: Sequence[QueuedRun], *, submits: bool = True) -> None:
    """Check that each launcher can take its jobs; without `submits`, skip launchers that are not installed."""
    for kind in dict.fromkeys(job.launch.kind for job in jobs):
        launcher = launcher_named(kind)
        if submits or launcher.is_here():
            launcher.check([(job.launch, job.shape) for job in jobs if job.launch.kind == kind])


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


def folder_of(study: Study) -> SweepFolder:
    """The folder of a study's sweep; it need not exist, but must be writable."""
    roots = {planned.recipe.runs for planned in study.planned}
    if len(roots) > 1:
        raise ConfigError(
            "runs", ", ".join(sorted(roots)), "is one folder for a whole sweep", "leave it out of the space"
        )
    check_runs(next(iter(roots)))
    return SweepFolder(user_path(next(iter(roots))).absolute() / study.name)


def silence_of(study: Study) -> str | None:
    """Why a launcher of the study does not answer, in one line; None if all answer or are not installed."""
    for kind in dict.fromkeys(planned.recipe.launch.kind for planned in study.planned):
        launcher = launcher_named(kind)
        if launcher.is_here() and (problem := launcher.silence()) is not None:
            return f"the scheduler does not answer: {problem}"
    return None


def check_study(study: Study, *, submits: bool = True, answered: bool = True) -> None:
    """Check everything that can be checked before anything is written.

    Args:
        submits: whether the jobs will be submitted from this host; if not, launchers need not be installed.
        answered: whether the launchers can be asked; if not, checks that need them are skipped.
    """
    jobs = [QueuedRun(run=planned.recipe.name, recipe=planned.recipe) for planned in study.planned]
    folder = folder_of(study)
    _check_name(folder, study)
    check_folder(folder.path, (job.launch for job in jobs))
    if answered:
        check_jobs(jobs, submits=submits)


def _check_name(folder: SweepFolder, study: Study) -> None:
    """Check that the folder is new, or is of this sweep: of the same sweep file, or of the same swept keys."""
    manifest = folder.manifest()
    if not manifest:
        return
    cure = f"give this one another name: sweep={folder.name}-2"
    if manifest.get("origin") != study.origin:
        rule = f"{folder.path} belongs to another sweep ({manifest.get('origin')})"
        raise ConfigError("sweep", study.name, rule, cure)
    # Single runs are submitted one by one to the same folder.
    if folder.name == SINGLE or study.origin.startswith("sweeps/"):
        return
    swept = {key for point in folder.points() if not point.get("control") for key in point["point"]}
    keys = {key for planned in study.planned if not planned.point.is_control for key in planned.point.values}
    if swept and swept != keys:
        rule = f"{folder.path} belongs to another sweep (of {', '.join(sorted(swept))})"
        raise ConfigError("sweep", study.name, rule, cure)


def decide(study: Study, *, force: bool = False, answered: bool = True) -> list[Decision]:
    """The action of a submission for every run of a study, after `check_study`; changes nothing.

    Args:
        force: submit ended runs again, from the beginning, whatever their outcome; waiting and running ones stay.
        answered: whether the launchers, which need not be installed, can be asked; if not, jobs in their queues are
            unknown.
    """
    folder = folder_of(study)
    check_study(study, submits=False, answered=answered)
    states = job_states(folder.submissions(), folder.path) if answered else {}
    return _decided(study, folder, states, force=force)


def _decided(study: Study, folder: SweepFolder, states: States, *, force: bool) -> list[Decision]:
    jobs = jobs_of(folder, folder.submissions())
    run_of = {identity.sha256: run for run in folder.runs() if (identity := run.identity()) is not None}
    decisions = []
    for planned in study.planned:
        # Find the run by its identity: its label may have changed.
        run = run_of.get(planned.identity.sha256)
        name = run.path.name if run else f"{planned.recipe.name}-{planned.identity.hash8}"
        action, outcome = ("submit", None) if run is None else standing(run, jobs.get(name), states)
        if force and action in ("done", "ended"):
            action = "submit"
        decisions.append(Decision(run=name, recipe=planned.recipe, outcome=outcome, planned=planned, action=action))
    return decisions


def submit(study: Study, report: Callable[[str], None], *, force: bool = False) -> Submitted:
    """Submit the missing runs of a study after `check_study`, and return at once.

    Args:
        force: submit ended runs again, from the beginning; their old folders go to `superseded/`.
    """
    check_study(study)
    folder = folder_of(study)
    folder.path.mkdir(parents=True, exist_ok=True)
    with folder.claim():
        # Check the name again under the claim: another sweep may have taken the folder meanwhile.
        _check_name(folder, study)
        settle(folder, report)
        decisions = _decided(study, folder, reconcile(folder), force=force)
        order = starting_order([decision.planned.point for decision in decisions])
        missing = [decisions[number] for number in order if decisions[number].action == "submit"]
        for decision in missing:
            run, recipe = folder.run(decision.run), decision.recipe
            if force and decision.outcome is not None and run.path.exists():
                supersede(folder, run)
            create_run(
                folder.path.parent,
                sweep=folder.name,
                name=run.name if run.hash8 else recipe.name,
                identity=decision.planned.identity,
                config=to_mapping(recipe),
                parent=parent_of(recipe.checkpoint.load_from),
            )
        _write(folder, study, decisions)
        submitted = enqueue(folder, missing, report)
    wake(folder)
    return Submitted(folder, tuple(decisions), tuple(submitted))


def _write(folder: SweepFolder, study: Study, decisions: Sequence[Decision]) -> None:
    """Write sweep.json and points.jsonl; points of an earlier plan stay if they have runs."""

    def row_of(point: SweepPoint, run: str | None, **facts: Any) -> dict[str, Any]:
        control = {"control": True} if point.is_control else {}
        return {"point": dict(point.values), "repeat": point.repeat, "run": run, "dropped": None, **control, **facts}

    points = [row_of(each.planned.point, each.run, estimate=estimate_values(each.recipe)) for each in decisions]
    now = {point["run"] for point in points}
    points += [row_of(drop.point, None, dropped={"stage": drop.stage, "reason": drop.reason}) for drop in study.dropped]
    earlier = [row for row in folder.points() if row.get("run") and row["run"] not in now]
    points += [row for row in earlier if folder.run(row["run"]).path.is_dir()]
    # A sweep whose recipes have different notes has no notes itself.
    texts = {planned.recipe.notes for planned in study.planned}
    notes = None if folder.name == SINGLE or len(texts) != 1 else texts.pop()
    manifest = {
        "name": study.name,
        "origin": study.origin,
        **({"notes": notes} if notes else {}),
        **study.definition,
        "created": folder.manifest().get("created", time.time()),
        "updated": time.time(),
        "points": len(study.planned) + len(study.dropped),
        "dropped": len(study.dropped),
    }
    folder.write_manifest(manifest, points)


def supersede(folder: SweepFolder, run: RunFolder) -> None:
    """Move a run's folder aside, so that the run can start from the beginning. No process may have claimed the run."""
    folder.superseded.mkdir(exist_ok=True)
    with run.claim():
        number = 1
        while (aside := folder.superseded / f"{run.path.name}.{number}").exists():
            number += 1
        run.path.rename(aside)


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
            # Not earlier than its runs' folders (see `jobs_of`): a host whose clock is ahead may have created them.
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
            # The jobs may be in the queue all the same: an answer that comes too late raises this error too.
            job_id = _settled(folder, submission)
            if job_id is None:
                raise
        submission = replace(submission, state="submitted", job_id=job_id)
        write_submission(folder.path, submission)
        report(f"job {submission.job_id}: {_described(submission)}")
        submitted.append(submission)
    return submitted


def arrays(items: Sequence[QueuedRun], *, answered: bool = True) -> Iterator[list[QueuedRun]]:
    """Group runs whose jobs have the same shape and config into arrays of the allowed size, in order of first use.

    Args:
        answered: whether the launchers can be asked for the size of an array; if not, use a size that all accept.
    """
    groups: dict[str, list[QueuedRun]] = {}
    for item in items:
        key = json.dumps([plain(item.shape), plain(item.launch)], sort_keys=True, default=str)
        groups.setdefault(key, []).append(item)
    sizes: dict[str, int | None] = {}
    for group in groups.values():
        kind = group[0].launch.kind
        if kind not in sizes:
            sizes[kind] = launcher_named(kind).max_array(is_answered=answered)
        most = sizes[kind] or len(group)
        yield from (group[first : first + most] for first in range(0, len(group), most))


def settle(folder: SweepFolder, report: Callable[[str], None]) -> None:
    """Complete or remove the intents of a process that was killed, by asking the launchers for their jobs."""
    for submission in folder.submissions():
        if submission.state == "intent":
            job_id = _settled(folder, submission)
            end = f"is job {job_id}" if job_id else "came to nothing"
            report(f"an interrupted submission {end}: {_described(submission)}")


def _settled(folder: SweepFolder, submission: Submission) -> str | None:
    """Write the number of a submission's jobs into its file, and return it; without jobs, remove the file (None)."""
    # Wait for an sbatch that the killed process left behind: it holds the lock.
    with claimed(folder.path, "sweep", patience_seconds=_PATIENCE_SECONDS, file=HANDING_OVER):
        job_id = launcher_named(submission.launcher).find(folder.path, submission)
        if job_id is None:
            drop_submission(folder.path, submission)
        else:
            write_submission(folder.path, replace(submission, state="submitted", job_id=job_id))
        return job_id


def _described(submission: Submission) -> str:
    shape, runs = submission.shape, len(submission.runs)
    nodes = f" on {shape.nodes} nodes" if shape.nodes > 1 else ""
    return f"{counted(runs, 'run')} of {counted(shape.processes, 'process', 'processes')}{nodes}"


def wake(folder: SweepFolder) -> None:
    """Make launchers start the processes that run the sweep's jobs on this host."""
    for kind in dict.fromkeys(submission.launcher for submission in folder.submissions()):
        launcher_named(kind).wake(folder.path)


HEADINGS = ("run", "layout", "processes", "nodes", "GPU-hours", "est. hours", "est. GB", "checkpoint GB", "action")
# Action → its words below the table, in the order in which the counts are shown.
_WORDS = {
    "submit": "to submit",
    "queued": "queued already",
    "running": "running already",
    "done": "done already",
    "ended": "ended otherwise",
}


def plan_lines(study: Study, decisions: Sequence[Decision], *, answered: bool = True) -> list[str]:
    """The runs of a study with their actions, their resources together, and the dropped points.

    Args:
        answered: whether the launcher can be asked how many jobs an array takes.
    """
    lines = [f"{study.name}: {counted(len(decisions), 'run')} ({study.origin})", *study.notices]
    lines += [f"  {line}" for line in aligned(HEADINGS, list(map(_cells, decisions)), right=HEADINGS[2:-1])]
    counts = Counter(decision.action for decision in decisions)
    lines.append(", ".join(f"{counts[action]} {words}" for action, words in _WORDS.items() if counts[action]))
    if submitted := [decision for decision in decisions if decision.action == "submit"]:
        lines.append(_resources(submitted, answered=answered))
    over = [decision for decision in decisions if decision.action in ("done", "ended")]
    if over:
        folder = SweepFolder(user_path(over[0].recipe.runs) / study.name)
        sweep = sweep_argument(folder.path)
        lacking = Counter(
            kind
            for decision in over
            for kind, config in decision.recipe.tracker.parts().items()
            if config.for_rebuild(1) is not None and not has_tracker(folder.run(decision.run), config.kind)
        )
        lines += [
            f"{counted(count, 'run')} ended without tracker={kind}; to write its files from metrics.jsonl: "
            f"titanlab sync --tracker {kind} {sweep}"
            for kind, count in lacking.items()
        ]
        if ended := [decision.outcome for decision in over if decision.action == "ended"]:
            # An ended run without an outcome gets one at the next reconciliation.
            known = sorted({outcome for outcome in ended if outcome})
            which = f"--outcome {','.join(known)}" if all(ended) else "--all-failed"
            lines.append(f"to run those again: titanlab retry {sweep} {which}")
    rows_dropped = [{"state": "dropped", "dropped_stage": drop.stage, "cause": drop.reason} for drop in study.dropped]
    return lines + dropped(rows_dropped)


def _cells(decision: Decision) -> tuple[str, ...]:
    shape, recipe = decision.shape, decision.recipe
    action = decision.outcome if decision.action == "ended" and decision.outcome else decision.action
    hours = memory = checkpoint = ""
    estimate = estimated(recipe)
    if not isinstance(estimate, str):
        memory = f"{estimate.reserved_bytes / 1e9:.1f}{'' if estimate.fits else ' too much'}"
        hours, checkpoint = (
            trimmed(value) if value < 999.5 else grouped(value)
            for value in (estimate.hours, estimate.checkpoint_bytes / 1e9)
        )
    return (
        decision.run,
        recipe.layout.label,
        str(shape.processes),
        "" if recipe.launch.runs_here else str(shape.nodes),
        f"{shape.gpu_hours:.1f}" if shape.gpu_hours else "",
        hours,
        memory,
        checkpoint,
        f"{action}, control" if decision.planned.point.is_control else action,
    )


def _resources(submitted: Sequence[Decision], *, answered: bool) -> str:
    """Jobs, processes, nodes and GPU-hours of the runs that will be submitted."""
    shapes = [decision.shape for decision in submitted]
    parts = [f"{counted(sum(shape.processes for shape in shapes), 'process', 'processes')} in all"]
    if not all(decision.recipe.launch.runs_here for decision in submitted):
        parts += [
            counted(sum(shape.nodes for shape in shapes), "node"),
            counted(len(list(arrays(submitted, answered=answered))), "array"),
        ]
    gpus = sum(shape.gpus_per_node * shape.nodes for shape in shapes)
    if gpus:
        hours = [shape.gpu_hours for shape in shapes]
        known = [value for value in hours if value is not None]
        total = f"{sum(known):,.1f}" if len(known) == len(hours) else "no limit to the"
        parts += [counted(gpus, "GPU"), f"{total} GPU-hours asked for"]
        estimates = [estimated(decision.recipe) for decision in submitted]
        used = [
            estimate.hours * shape.processes
            for estimate, shape in zip(estimates, shapes, strict=True)
            if not isinstance(estimate, str)
        ]
        if len(used) == len(estimates):
            parts.append(f"about {sum(used):,.1f} used by estimate")
    return f"{counted(len(submitted), 'job')}: {', '.join(parts)}; the largest has {max(s.processes for s in shapes):,}"


def plan_values(study: Study, decisions: Sequence[Decision]) -> dict[str, Any]:
    """The content of `plan_lines` as plain values."""
    runs = []
    for decision in decisions:
        point, estimate = decision.planned.point, estimated(decision.recipe)
        runs.append(
            {
                "run": decision.run,
                "point": dict(point.values),
                "repeat": point.repeat,
                "control": point.is_control,
                "layout": decision.recipe.layout.label,
                "action": decision.action,
                "outcome": decision.outcome,
                "shape": decision.shape.to_mapping(),
                "gpu_hours": decision.shape.gpu_hours,
                "estimate": None if isinstance(estimate, str) else estimate.to_mapping(),
            }
        )
    return {
        "sweep": study.name,
        "origin": study.origin,
        **study.definition,
        "runs": runs,
        "dropped": [
            {"point": dict(drop.point.values), "repeat": drop.point.repeat, "stage": drop.stage, "reason": drop.reason}
            for drop in study.dropped
        ],
        "notices": list(study.notices),
        "counts": dict(Counter(decision.action for decision in decisions)),
    }
