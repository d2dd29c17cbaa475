"""Submits ended runs again: they resume from their checkpoints, or start again if other code had run them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from titanlab.errors import ConfigError
from titanlab.launch.contract import LaunchConfig
from titanlab.launch.shape import Shape, shape_of
from titanlab.launch.submission import Submission
from titanlab.recipe.composition.frozen import check_changeable, frozen_recipe
from titanlab.records.outcome import OutcomeKind
from titanlab.records.run_folder import RunFolder, create_run
from titanlab.sweep import snapshot
from titanlab.sweep.enqueue import Item, check_jobs, enqueue, settle, wake
from titanlab.sweep.queue import silence
from titanlab.sweep.reconcile import reconcile
from titanlab.sweep.standing import standing, supersede
from titanlab.sweep.sweep_folder import SweepFolder, jobs_of, readable

# Overrides may change how a job is submitted, not what a run computes.
CHANGEABLE = ("launch.", "cluster.per_node", "cluster.nodes")
FAILED = tuple(kind.value for kind in OutcomeKind if kind is not OutcomeKind.DONE)


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """A run that is submitted again.

    Attributes:
        run: its folder.
        outcome: the kind of its outcome; None if it never had a job.
        anew: it starts from the beginning; its old folder is renamed.
        shape: the resources of its job.
        launch: the launcher's config.
    """

    run: RunFolder
    outcome: str | None
    anew: bool
    shape: Shape
    launch: LaunchConfig


@dataclass(frozen=True, kw_only=True)
class Retried:
    """The result of a retry.

    Attributes:
        chosen: the runs, in the order of their names.
        jobs: the submissions; empty after a dry run.
    """

    chosen: tuple[Chosen, ...]
    jobs: tuple[Submission, ...]


def retry(
    folder: SweepFolder,
    report: Callable[[str], None],
    *,
    outcomes: Collection[str] = (),
    stale: bool = False,
    names: Sequence[str] = (),
    overrides: Sequence[str] = (),
    dry_run: bool = False,
) -> Retried:
    """Submit ended runs again, and return at once.

    Args:
        report: called with a line for each action.
        outcomes: choose runs with these outcomes; none: any outcome, if runs are named.
        stale: choose runs that other code than the present has run, also finished ones; they start from the beginning.
        names: of runs; none: all of the sweep.
        overrides: of `launch` and of the cluster's sizes, for the new jobs.
        dry_run: submit nothing.

    Raises:
        ConfigError: no choice of runs is given, a named run does not exist, or the launcher refuses.
    """
    _check(outcomes, overrides, chooses=bool(outcomes or stale or names))
    with folder.claim():
        settle(folder, report)
        chosen = _chosen(folder, report, outcomes, names, overrides, stale=stale)
        if dry_run or not chosen:
            return Retried(chosen=tuple(chosen), jobs=())
        check_jobs([(choice.launch, choice.shape) for choice in chosen])
        for choice in chosen:
            if choice.anew:
                _begin_anew(folder, choice.run)
        items = [Item(run=choice.run.path.name, shape=choice.shape, launch=choice.launch) for choice in chosen]
        submitted = enqueue(folder, items, report)
    wake(folder)
    return Retried(chosen=tuple(chosen), jobs=tuple(submitted))


def _chosen(
    folder: SweepFolder,
    report: Callable[[str], None],
    outcomes: Collection[str],
    names: Sequence[str],
    overrides: Sequence[str],
    *,
    stale: bool,
) -> list[Chosen]:
    jobs, states = jobs_of(folder, folder.submissions()), reconcile(folder)
    if (problem := silence(states)) is not None:
        report(f"{problem}; runs whose jobs it may have are left alone")
    code = snapshot.fingerprint() if stale else None
    chosen = []
    for run in readable(folder.find(names), report, named=bool(names)):
        word, outcome = standing(run, jobs.get(run.path.name), states)
        if stale and word in ("done", "ended") and (not outcomes or outcome in outcomes):
            is_chosen = _made_by(run) not in (None, code)
        elif stale:
            is_chosen = False
        elif names and not outcomes:
            is_chosen = word in ("ended", "submit")
        else:
            is_chosen = word == "ended" and outcome in outcomes
        if is_chosen:
            shape, launch = _next_job(run, overrides)
            chosen.append(Chosen(run=run, outcome=outcome, anew=stale, shape=shape, launch=launch))
        elif names:
            report(f"{run.path.name} is left alone: {outcome or word}")
    return chosen


def _made_by(run: RunFolder) -> str | None:
    """The fingerprint of the code that has run a run; None if no attempt has begun."""
    code: Mapping[str, Any] = (run.env() or {}).get("code", {})
    return code.get("fingerprint")


def _begin_anew(folder: SweepFolder, run: RunFolder) -> None:
    config, identity = run.config(), run.identity()
    if identity is None:
        raise ConfigError("run", run.path, "has no identity.json", "restore that file, or submit the sweep again")
    supersede(folder, run)
    create_run(folder.path.parent, sweep=folder.name, name=run.name, identity=identity, config=config)


def _next_job(run: RunFolder, overrides: Sequence[str]) -> tuple[Shape, LaunchConfig]:
    """The shape and the launcher of a run's next job."""
    recipe = frozen_recipe(run, overrides)
    return shape_of(recipe), recipe.launch


def _check(outcomes: Collection[str], overrides: Sequence[str], *, chooses: bool) -> None:
    if not chooses:
        cure = "try --outcome hang,node_fail, --all-failed or --stale, or name runs"
        raise ConfigError("arguments", "", "say nothing of which runs", cure)
    for outcome in outcomes:
        if outcome not in FAILED:
            rule = "is done" if outcome == OutcomeKind.DONE.value else "is no outcome"
            raise ConfigError("--outcome", outcome, rule, f"known: {', '.join(FAILED)}")
    check_changeable(overrides, CHANGEABLE)
    for override in overrides:
        key, _, value = override.partition("=")
        if key == "launch.kind":
            raise ConfigError(key, value, "would be another launcher", "submit the sweep under another name: sweep=…")
