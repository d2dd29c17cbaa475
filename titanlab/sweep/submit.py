"""From a study to jobs: what of it is missing is submitted, and nothing twice, whenever this process is killed.

Run folders are made first, then the snapshot of the code, then an intent for each array, then the array itself.
Whatever is there at the next submission is taken as it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlab.errors import ConfigError
from titanlab.launch.contract import States
from titanlab.launch.shape import Shape, shape_of
from titanlab.launch.submission import Submission
from titanlab.recipe.recipe import to_mapping
from titanlab.records.run_folder import RunFolder, check_runs, create_run
from titanlab.sweep.enqueue import Item, check_jobs, enqueue, settle, silent_launcher, wake
from titanlab.sweep.queue import job_states
from titanlab.sweep.reconcile import reconcile
from titanlab.sweep.standing import standing, supersede
from titanlab.sweep.study.plan import SINGLE, Dropped, Planned, Study
from titanlab.sweep.sweep_folder import SweepFolder, jobs_of


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What becomes of one run of a study.

    Attributes:
        planned: the run as the study has it.
        run_name: of its folder.
        action: `submit`, `queued`, `running`, `done`, or `ended` otherwise: only a retry submits that again.
        outcome: the word for the end, of one that has ended.
        shape: what its job takes.
    """

    planned: Planned
    run_name: str
    action: str
    outcome: str | None
    shape: Shape


@dataclass(frozen=True, kw_only=True)
class Submitted:
    """What came of a submission.

    Attributes:
        folder: the sweep's.
        decisions: one for each run of the study.
        jobs: number, shape and runs of each array that was submitted now.
    """

    folder: SweepFolder
    decisions: tuple[Decision, ...]
    jobs: tuple[tuple[str, Shape, tuple[str, ...]], ...]


def folder_of(study: Study) -> SweepFolder:
    """The folder of a study's sweep, whether or not it is there.

    Raises:
        ConfigError: its runs are to lie in several, or where nothing can be written.
    """
    roots = {planned.recipe.runs for planned in study.planned}
    if len(roots) > 1:
        raise ConfigError(
            "runs", ", ".join(sorted(roots)), "is one folder for a whole sweep", "leave it out of the space"
        )
    check_runs(next(iter(roots)))
    return SweepFolder(Path(next(iter(roots))).expanduser().absolute() / study.name)


def silence_of(study: Study) -> str | None:
    """Why a launcher of the study does not answer, in a line; None where all do, or are not here."""
    return silent_launcher(planned.recipe.launch for planned in study.planned)


def check_study(study: Study, *, submits: bool = True, answered: bool = True) -> list[Shape]:
    """The shape of every run's job; everything that can be known before anything is made.

    Args:
        submits: the launcher has to be here; else it is asked only if it is.
        answered: it can be asked; else jobs are held against nothing that only the launcher knows.

    Raises:
        ConfigError: a job is larger than its cluster, the launcher cannot take it, or the folder is another sweep's.
    """
    shapes = [shape_of(planned.recipe) for planned in study.planned]
    _hold_name(folder_of(study), study)
    launches = [planned.recipe.launch for planned in study.planned]
    if answered:
        check_jobs(list(zip(launches, shapes, strict=True)), submits=submits)
    return shapes


def decide(study: Study, *, force: bool = False, states: States | None = None, answered: bool = True) -> list[Decision]:
    """What a submission would do about every run of a study; changes nothing. The launcher need not be here.

    Args:
        force: do those anew that have ended, however; what waits or runs is left alone.
        states: where jobs stand; None: their launchers are asked.
        answered: the launchers can be asked; else nothing is known of jobs that are in their queues.

    Raises:
        ConfigError: as in `check_study`.
    """
    folder, shapes = folder_of(study), check_study(study, submits=False, answered=answered)
    if not answered:
        states = {}
    if states is None:
        submitted = folder.submissions()
        states = job_states(submitted, folder.path) if submitted else {}
    return _decided(study, folder, shapes, states, force=force)


def submit(study: Study, report: Callable[[str], None], *, force: bool = False) -> Submitted:
    """Submit what is missing of a study, and return at once.

    Args:
        report: told, line by line, what is done.
        force: do those anew that have ended; their folders go to `superseded/`.

    Raises:
        ConfigError: as in `check_study`; or the launcher refuses the jobs.
    """
    folder, shapes = folder_of(study), check_study(study)
    folder.path.mkdir(parents=True, exist_ok=True)
    with folder.claim():
        # Now that nobody else can take it.
        _hold_name(folder, study)
        settle(folder, report)
        decisions = _decided(study, folder, shapes, reconcile(folder), force=force)
        wanted = [each for each in decisions if each.action == "submit"]
        items = [_prepared(folder, each, force=force) for each in wanted]
        _write(folder, study, decisions)
        made = enqueue(folder, items, report)
    wake(folder)
    return Submitted(folder=folder, decisions=tuple(decisions), jobs=tuple(_jobs(made)))


def _decided(
    study: Study, folder: SweepFolder, shapes: Sequence[Shape], states: States, *, force: bool
) -> list[Decision]:
    jobs, known = jobs_of(folder, folder.submissions()), _by_identity(folder)
    decisions = []
    for planned, shape in zip(study.planned, shapes, strict=True):
        # By what it is and not by its label, which may have changed.
        run = known.get(planned.identity.sha256)
        name = run.path.name if run else f"{planned.recipe.name}-{planned.identity.hash8}"
        action, outcome = ("submit", None) if run is None else standing(run, jobs.get(name), states)
        if force and action in ("done", "ended"):
            action = "submit"
        decisions.append(Decision(planned=planned, run_name=name, action=action, outcome=outcome, shape=shape))
    return decisions


def _prepared(folder: SweepFolder, decision: Decision, *, force: bool) -> Item:
    """A run's folder, made if it is not there, and its place in the queue to come."""
    run, recipe = folder.run(decision.run_name), decision.planned.recipe
    if force and decision.outcome is not None and run.path.exists():
        supersede(folder, run)
    name = run.name if run.hash8 else recipe.name
    create_run(
        folder.path.parent,
        sweep=folder.name,
        name=name,
        identity=decision.planned.identity,
        config=to_mapping(recipe),
    )
    return Item(run=decision.run_name, shape=decision.shape, launch=recipe.launch)


def _by_identity(folder: SweepFolder) -> dict[str, RunFolder]:
    found = ((run, run.identity()) for run in folder.runs())
    return {identity.sha256: run for run, identity in found if identity is not None}


def _hold_name(folder: SweepFolder, study: Study) -> None:
    """The rule that a folder belongs to one sweep: to a file, or to the keys that a command line sweeps."""
    there = folder.manifest()
    if not there:
        return
    cure = f"give this one another name: sweep={folder.name}-2"
    if there.get("origin") != study.origin:
        rule = f"{folder.path} belongs to another sweep ({there.get('origin')})"
        raise ConfigError("sweep", study.name, rule, cure)
    # Runs that belong to no sweep are submitted one by one into this folder.
    if folder.name == SINGLE or study.origin.startswith("sweeps/"):
        return
    swept = {key for point in folder.points() for key in point["point"]}
    keys = {key for planned in study.planned for key in planned.point.values}
    if swept and swept != keys:
        rule = f"{folder.path} belongs to another sweep (of {', '.join(sorted(swept))})"
        raise ConfigError("sweep", study.name, rule, cure)


def _write(folder: SweepFolder, study: Study, decisions: Sequence[Decision]) -> None:
    """sweep.json and points.jsonl; of an earlier plan those points stay that have runs."""
    points = [_point(each.planned, run=each.run_name) for each in decisions]
    points += [_point(each, dropped={"stage": each.stage, "reason": each.reason}) for each in study.dropped]
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


def _point(
    each: Planned | Dropped, *, run: str | None = None, dropped: Mapping[str, str] | None = None
) -> dict[str, Any]:
    return {"point": dict(each.point.values), "repeat": each.point.repeat, "run": run, "dropped": dropped}


def _jobs(made: Sequence[Submission]) -> list[tuple[str, Shape, tuple[str, ...]]]:
    return [(each.job_id or each.token, each.shape, each.runs) for each in made]
