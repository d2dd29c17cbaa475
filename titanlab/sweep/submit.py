"""Submits the missing runs of a study, each only once, even if this process is killed at any moment.

The order is: run folders, the snapshot of the code, an intent for each array, the array itself. The next submission
continues from the parts that exist. The plan of a submission is text or plain values, with the planner's estimates.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from titanlab.checkpoint import parent_of
from titanlab.errors import ConfigError
from titanlab.launch import JobShape, States, Submission, launch_of, launcher_named, shape_of
from titanlab.plan import MEMORY_ERROR, estimate_of
from titanlab.recipe import to_mapping
from titanlab.records import check_runs, create_run
from titanlab.sweep.enqueue import (
    QueuedRun,
    arrays,
    check_folder,
    check_jobs,
    enqueue,
    settle,
    standing,
    supersede,
    wake,
)
from titanlab.sweep.listing import aligned, dropped
from titanlab.sweep.plan import SINGLE, Dropped, PlannedRun, Study, starting_order
from titanlab.sweep.reconcile import job_states, reconcile
from titanlab.sweep.rows import estimate_values
from titanlab.sweep.space import SweepPoint
from titanlab.sweep.sweep_folder import SweepFolder, jobs_of
from titanlab.system import counted, grouped, sweep_argument, trimmed, user_path
from titanlab.train import has_tracker


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The action for one run of a study.

    Attributes:
        action: `submit`, `queued`, `running`, `done`, or `ended` (with another outcome: only a retry submits it again).
    """

    planned: PlannedRun
    run_name: str
    action: str
    outcome: str | None
    shape: JobShape

    @property
    def job(self) -> QueuedRun:
        """The job that a submission puts into the queue."""
        return QueuedRun(run=self.run_name, shape=self.shape, launch=launch_of(self.planned.recipe))


@dataclass(frozen=True, kw_only=True)
class Submitted:
    """The result of a submission."""

    folder: SweepFolder
    decisions: tuple[Decision, ...]
    submissions: tuple[Submission, ...]


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
    for kind in dict.fromkeys(launch_of(planned.recipe).kind for planned in study.planned):
        launcher = launcher_named(kind)
        if launcher.is_here() and (problem := launcher.silence()) is not None:
            return f"the scheduler does not answer: {problem}"
    return None


def check_study(study: Study, *, submits: bool = True, answered: bool = True) -> list[JobShape]:
    """Check everything that can be checked before anything is written. Returns the shape of every run's job.

    Args:
        submits: whether the jobs will be submitted from this host; if not, launchers need not be installed.
        answered: whether the launchers can be asked; if not, checks that need them are skipped.
    """
    shapes = [shape_of(planned.recipe) for planned in study.planned]
    _check_name(folder_of(study), study)
    launches = [launch_of(planned.recipe) for planned in study.planned]
    check_folder(folder_of(study).path, launches)
    if answered:
        check_jobs(list(zip(launches, shapes, strict=True)), submits=submits)
    return shapes


def decide(study: Study, *, force: bool = False, states: States | None = None, answered: bool = True) -> list[Decision]:
    """The action of a submission for every run of a study, after `check_study`; changes nothing.

    Args:
        force: submit ended runs again, from the beginning, whatever their outcome; waiting and running ones stay.
        states: of jobs; None: ask their launchers, which need not be installed.
        answered: whether the launchers can be asked; if not, jobs in their queues are unknown.
    """
    folder, shapes = folder_of(study), check_study(study, submits=False, answered=answered)
    if states is None:
        states = job_states(folder.submissions(), folder.path) if answered else {}
    return _decided(study, folder, shapes, states, force=force)


def submit(study: Study, report: Callable[[str], None], *, force: bool = False) -> Submitted:
    """Submit the missing runs of a study after `check_study`, and return at once.

    Args:
        force: submit ended runs again, from the beginning; their old folders go to `superseded/`.
    """
    folder, shapes = folder_of(study), check_study(study)
    folder.path.mkdir(parents=True, exist_ok=True)
    with folder.claim():
        # Again under the claim: another sweep may have taken the folder meanwhile.
        _check_name(folder, study)
        settle(folder, report)
        decisions = _decided(study, folder, shapes, reconcile(folder), force=force)
        order = starting_order([decision.planned.point for decision in decisions])
        missing = [decisions[number] for number in order if decisions[number].action == "submit"]
        for decision in missing:
            run, recipe = folder.run(decision.run_name), decision.planned.recipe
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
        submitted = enqueue(folder, [decision.job for decision in missing], report)
    wake(folder)
    return Submitted(folder=folder, decisions=tuple(decisions), submissions=tuple(submitted))


def _decided(
    study: Study, folder: SweepFolder, shapes: Sequence[JobShape], states: States, *, force: bool
) -> list[Decision]:
    jobs = jobs_of(folder, folder.submissions())
    run_of = {identity.sha256: run for run in folder.runs() if (identity := run.identity()) is not None}
    decisions = []
    for planned, shape in zip(study.planned, shapes, strict=True):
        # Find the run by its identity: its label may have changed.
        run = run_of.get(planned.identity.sha256)
        name = run.path.name if run else f"{planned.recipe.name}-{planned.identity.hash8}"
        action, outcome = ("submit", None) if run is None else standing(run, jobs.get(name), states)
        if force and action in ("done", "ended"):
            action = "submit"
        decisions.append(Decision(planned=planned, run_name=name, action=action, outcome=outcome, shape=shape))
    return decisions


def _check_name(folder: SweepFolder, study: Study) -> None:
    """Check that the folder belongs to this sweep: to its file, or to the keys that its command line sweeps."""
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


def _write(folder: SweepFolder, study: Study, decisions: Sequence[Decision]) -> None:
    """Write sweep.json and points.jsonl; points of an earlier plan stay if they have runs."""

    def row_of(point: SweepPoint, run: str | None, dropped: Mapping[str, str] | None) -> dict[str, Any]:
        control = {"control": True} if point.is_control else {}
        return {"point": dict(point.values), "repeat": point.repeat, "run": run, "dropped": dropped, **control}

    points = [
        {**row_of(planned.point, decision.run_name, None), "estimate": estimate_values(planned.recipe)}
        for decision in decisions
        for planned in [decision.planned]
    ]
    points += [row_of(drop.point, None, {"stage": drop.stage, "reason": drop.reason}) for drop in study.dropped]
    now = {point["run"] for point in points}
    earlier = [row for row in folder.points() if row.get("run") and row["run"] not in now]
    points += [row for row in earlier if folder.run(row["run"]).path.is_dir()]
    manifest = {
        "name": study.name,
        "origin": study.origin,
        **study.definition,
        "created": folder.manifest().get("created", time.time()),
        "updated": time.time(),
        "points": len(study.planned) + len(study.dropped),
        "dropped": len(study.dropped),
    }
    folder.write_manifest(manifest, points)


HEADINGS = ("run", "layout", "processes", "nodes", "GPU-hours", "est. hours", "est. GB", "checkpoint GB", "action")
FIGURES = ("processes", "nodes", "GPU-hours", "est. hours", "est. GB", "checkpoint GB")
# In the order in which the counts are shown.
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
    rows = [_cells(decision) for decision in decisions]
    lines = [f"{study.name}: {counted(len(decisions), 'run')} ({study.origin})"]
    lines += study.notices
    lines += [f"  {line}" for line in aligned(HEADINGS, rows, right=FIGURES)]
    counts = Counter(decision.action for decision in decisions)
    lines.append(", ".join(f"{counts[action]} {words}" for action, words in _WORDS.items() if counts[action]))
    submitted = [decision for decision in decisions if decision.action == "submit"]
    if submitted:
        lines.append(_resources(submitted, answered=answered))
    lines += _without_tracker(study, decisions)
    ended = [decision for decision in decisions if decision.action == "ended"]
    if ended:
        outcomes = sorted({decision.outcome for decision in ended if decision.outcome})
        # An ended run without an outcome gets one at the next reconciliation.
        which = f"--outcome {','.join(outcomes)}" if all(decision.outcome for decision in ended) else "--all-failed"
        sweep = sweep_argument(user_path(study.planned[0].recipe.runs) / study.name)
        lines.append(f"to run those again: titanlab retry {sweep} {which}")
    rows_dropped = [{"state": "dropped", "dropped_stage": drop.stage, "cause": drop.reason} for drop in study.dropped]
    return lines + dropped(rows_dropped)


def _without_tracker(study: Study, decisions: Sequence[Decision]) -> list[str]:
    """A line for each tracker that the recipes name and that has no data of runs that have ended."""
    over = [decision for decision in decisions if decision.action in ("done", "ended")]
    if not over:
        return []
    folder = SweepFolder(user_path(over[0].planned.recipe.runs) / study.name)
    lacking = Counter(
        kind
        for decision in over
        for kind, config in decision.planned.recipe.tracker.parts().items()
        if config.for_rebuild(1) is not None and not has_tracker(folder.run(decision.run_name), config.kind)
    )
    return [
        f"{counted(count, 'run')} ended without tracker={kind}; to write its files from metrics.jsonl: "
        f"titanlab sync --tracker {kind} {sweep_argument(folder.path)}"
        for kind, count in lacking.items()
    ]


def plan_values(study: Study, decisions: Sequence[Decision]) -> dict[str, Any]:
    """The same content as plain values."""
    return {
        "sweep": study.name,
        "origin": study.origin,
        **study.definition,
        "runs": [
            {
                "run": decision.run_name,
                "point": dict(decision.planned.point.values),
                "repeat": decision.planned.point.repeat,
                "control": decision.planned.point.is_control,
                "layout": decision.planned.recipe.layout.label,
                "action": decision.action,
                "outcome": decision.outcome,
                "shape": decision.shape.to_mapping(),
                "gpu_hours": decision.shape.gpu_hours,
                "estimate": None if estimate is None else estimate.to_mapping(),
            }
            for decision in decisions
            for estimate in [estimate_of(decision.planned.recipe)]
        ],
        "dropped": [
            {"point": dict(drop.point.values), "repeat": drop.point.repeat, "stage": drop.stage, "reason": drop.reason}
            for drop in study.dropped
        ],
        "notices": list(study.notices),
        "counts": dict(Counter(decision.action for decision in decisions)),
    }


def _cells(decision: Decision) -> tuple[str, ...]:
    shape, recipe = decision.shape, decision.planned.recipe
    action = decision.outcome if decision.action == "ended" and decision.outcome else decision.action
    hours = memory = checkpoint = ""
    # Without one, nothing is known of the devices.
    if (estimate := estimate_of(recipe)) is not None:
        memory = f"{estimate.reserved_bytes / 1e9:.1f}{'' if estimate.fits else ' too much'}"
        hours, checkpoint = (
            trimmed(value) if value < 999.5 else grouped(value)
            for value in (estimate.hours, estimate.checkpoint_bytes / 1e9)
        )
    return (
        decision.run_name,
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
    if not all(decision.planned.recipe.launch.runs_here for decision in submitted):
        parts += [
            counted(sum(shape.nodes for shape in shapes), "node"),
            counted(len(list(arrays([decision.job for decision in submitted], answered=answered))), "array"),
        ]
    gpus = sum(shape.gpus_per_node * shape.nodes for shape in shapes)
    if gpus:
        hours = [shape.gpu_hours for shape in shapes]
        known = [value for value in hours if value is not None]
        total = f"{sum(known):,.1f}" if len(known) == len(hours) else "no limit to the"
        parts += [counted(gpus, "GPU"), f"{total} GPU-hours asked for"]
    return f"{counted(len(submitted), 'job')}: {', '.join(parts)}; the largest has {max(s.processes for s in shapes):,}"


def fitting(study: Study, *, strictly: bool) -> Study:
    """The study without the runs that do not fit into memory, with a notice on runs that may not fit.

    Args:
        strictly: leave out every run whose estimate exceeds a device's memory; else only if it does so by more than the
            error of estimates.
    """
    kept: list[PlannedRun] = []
    dropped = list(study.dropped)
    doubtful = 0
    for planned in study.planned:
        estimate = estimate_of(planned.recipe)
        if estimate is None or estimate.fits or not (strictly or estimate.cannot_fit):
            kept.append(planned)
            doubtful += estimate is not None and not estimate.fits
        else:
            assert estimate.limit_bytes is not None
            needed, limit = estimate.reserved_bytes / 1e9, estimate.limit_bytes / 1e9
            reason = f"would reserve about {needed:.0f} GB of a device's {limit:.1f} GB"
            dropped.append(Dropped(point=planned.point, stage="memory", reason=reason))
    if not kept:
        rule = f"none of {len(study.planned)} runs fits into memory; {dropped[-1].reason}"
        cure = "see what fits: titanlab plan; or submit them all the same: --keep"
        raise ConfigError("arguments", study.name, rule, cure)
    notices = []
    percent = f"{100 * MEMORY_ERROR:.0f} %"
    if doubtful:
        notices.append(
            f"{counted(doubtful, 'run')} may not fit into memory: each estimate is too much, but by less than the "
            f"largest error of estimates ({percent}); --prune leaves them out"
        )
    left_out = len(study.planned) - len(kept)
    if left_out and not strictly:
        notices.append(
            f"{counted(left_out, 'run')} left out: their estimates exceed a device's memory by more than {percent}, "
            "the largest error of estimates; --keep keeps all"
        )
    return dataclasses.replace(study, planned=tuple(kept), dropped=tuple(dropped), notices=(*study.notices, *notices))
