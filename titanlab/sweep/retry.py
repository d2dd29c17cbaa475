"""Cancels runs of a sweep, and submits ended ones again: they resume, or start from the beginning under other code."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from titanlab.checkpoint import Place, parent_of, put_back
from titanlab.errors import ConfigError
from titanlab.launch import (
    Submission,
    go_back,
    launcher_named,
    missed_checkpoint,
    pass_over_damaged,
    with_progress,
)
from titanlab.recipe import (
    LAYOUT,
    Recipe,
    adapted,
    check_changeable,
    check_unedited,
    from_mapping,
    next_recipe,
    recipe_changes,
    to_mapping,
)
from titanlab.records import Outcome, OutcomeKind, RunFolder, create_run
from titanlab.sweep import sweep_folder
from titanlab.sweep.reconcile import reconcile, silence, standing
from titanlab.sweep.submit import QueuedRun, check_jobs, checked, enqueue, settle, supersede, wake
from titanlab.sweep.sweep_folder import SweepFolder, jobs_of, readable
from titanlab.system import sweep_argument

# Overrides may change how a job is submitted, not what a run computes.
CHANGEABLE = ("notes", "launch.", "cluster.per_node", "cluster.nodes", *LAYOUT)
FAILED = tuple(kind.value for kind in OutcomeKind if kind is not OutcomeKind.DONE)


def standings(
    folder: SweepFolder, report: Callable[[str], None], names: Sequence[str], *, note: str = ""
) -> Iterator[tuple[RunFolder, tuple[Submission, int] | None, str, str | None]]:
    """Each run with its job, its state and its outcome; first writes results for runs whose jobs ended without one.

    Args:
        names: names of runs; empty: all runs.
        note: if the scheduler does not answer, this text is added to the report, and says what follows.
    """
    jobs, states = jobs_of(folder, folder.submissions()), reconcile(folder)
    if (problem := silence(states)) is not None:
        report(problem + note)
    for run in readable(folder.find(names), report, named=bool(names)):
        job = jobs.get(run.path.name)
        yield run, job, *standing(run, job, states)


@dataclass
class Cancelled:
    """The cancelled runs of a sweep, by name.

    Attributes:
        stopping: these were running, and were asked to save and end.
        withdrawn: these waited, and were removed from the queue.
        ended: these had ended before.
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
                    outcome = Outcome(kind=OutcomeKind.CANCELLED, attempt=0, cause="cancelled before it started")
                    run.write_result(with_progress(run, outcome))
            except ConfigError:
                # The run has just started; it records its own end.
                cancelled.withdrawn.remove(name)
                cancelled.stopping.append(name)
    return cancelled


def retry(
    folder: SweepFolder,
    report: Callable[[str], None],
    *,
    outcomes: Collection[str] = (),
    stale: bool = False,
    names: Sequence[str] = (),
    overrides: Sequence[str] = (),
    dry_run: bool = False,
) -> list[QueuedRun]:
    """Submit ended runs again, and return at once. Returns their new jobs, in the order of the runs' names.

    Args:
        outcomes: choose runs with these outcomes; none: any outcome, if runs are named.
        stale: choose runs whose code differs from the present code, also finished ones; they start from the beginning,
            and their old folders are renamed.
        names: names of runs; empty: all runs of the sweep.
        overrides: for the new jobs; may change `launch`, the cluster's sizes and the layout.

    Raises:
        ConfigError: no choice of runs is given, a named run does not exist, or the launcher refuses.
    """
    if not (outcomes or stale or names):
        cure = "try --outcome hang,node_fail, --all-failed or --stale, or name runs"
        raise ConfigError("arguments", "", "do not say which runs to retry", cure)
    for outcome in outcomes:
        if outcome not in FAILED:
            rule = "is done" if outcome == OutcomeKind.DONE.value else "is not an outcome"
            raise ConfigError("--outcome", outcome, rule, f"known: {', '.join(FAILED)}")
    check_changeable(overrides, CHANGEABLE, presets=("parallelism", "schedule", "ac"))
    if stale and _changes_layout(overrides):
        rule = "starts runs from the beginning, as the sweep describes them"
        raise ConfigError("--stale", " ".join(overrides), rule, "leave one of the two out")
    for override in overrides:
        key, _, value = override.partition("=")
        if key == "launch.kind":
            rule = "cannot be changed for a sweep's runs"
            raise ConfigError(key, value, rule, "submit the sweep under another name: sweep=…")
    with folder.claim():
        settle(folder, report)
        chosen, note = [], "; runs that may still have a job are left alone"
        for run, _, word, ended_as in standings(folder, report, names, note=note):
            if stale:
                # `made_by` is None if no attempt has begun.
                made_by = (run.env() or {}).get("code", {}).get("fingerprint")
                is_chosen = word in ("done", "ended") and (not outcomes or ended_as in outcomes)
                is_chosen = is_chosen and made_by not in (None, sweep_folder.present_code())
            elif names and not outcomes:
                is_chosen = word in ("ended", "submit")
            else:
                is_chosen = word == "ended" and ended_as in outcomes
            if is_chosen:
                chosen.append(replace(_next_job(run, overrides, report), outcome=ended_as))
            elif names:
                report(f"{run.path.name} is left alone: {ended_as or word}")
        if dry_run or not chosen:
            return chosen
        check_jobs(chosen)
        for run in map(folder.run, (job.run for job in chosen if stale)):
            config, identity = run.config(), run.identity()
            if identity is None:
                cure = "restore that file, or submit the sweep again"
                raise ConfigError("run", run.path, "has no identity.json", cure)
            parent = parent_of(run.section("checkpoint").get("load_from"))
            supersede(folder, run)
            create_run(
                folder.path.parent, sweep=folder.name, name=run.name, identity=identity, config=config, parent=parent
            )
        enqueue(folder, chosen, report)
    wake(folder)
    return chosen


def _next_job(run: RunFolder, overrides: Sequence[str], report: Callable[[str], None]) -> QueuedRun:
    """The next job of a run. If the overrides change the layout, the recipe is checked like that of a new run."""
    check_unedited(run)
    config = run.config()
    recipe = next_recipe(config, overrides, CHANGEABLE, file=run.path / "config.yaml")
    if not _changes_layout(overrides):
        return QueuedRun(run=run.path.name, recipe=recipe)
    try:
        recipe, line = adapted(recipe, from_mapping(config), overrides)
        item = item_of(run, checked(recipe))
    except ConfigError as error:
        raise ConfigError(error.key, error.value, f"{error.rule} (in {run.path.name})", error.cure) from error
    if line:
        report(f"{run.path.name}: {line}")
    return item


def _changes_layout(overrides: Sequence[str]) -> bool:
    groups = {override.partition("=")[0].partition(".")[0] for override in overrides}
    return bool(groups - {"launch", "cluster"})


def item_of(run: RunFolder, recipe: Recipe) -> QueuedRun:
    """The job of a run with a checked recipe."""
    changed = recipe_changes(run.config(), to_mapping(recipe))
    return QueuedRun(run=run.path.name, recipe=recipe, changes=changed)


def submitted_with(run: RunFolder) -> Mapping[str, Any] | None:
    """The launcher's config of the run's latest submission, as plain values; None if the run was never submitted."""
    folder = SweepFolder(run.path.parent)
    latest = jobs_of(folder, folder.submissions()).get(run.path.name)
    return None if latest is None else latest[0].launch


def resubmit(
    run: RunFolder, recipe: Recipe, report: Callable[[str], None], *, checkpoint: Place | None = None
) -> Submission | None:
    """Submit the next attempt of a run that has ended. Returns None if the run is done.

    Args:
        checkpoint: an older checkpoint to resume from; later ones are renamed at once.

    Raises:
        ConfigError: a rule is broken, the run waits or runs already, or the launcher refuses; nothing was submitted.
    """
    folder = SweepFolder(run.path.parent.absolute())
    recipe = checked(recipe)
    item = item_of(run, recipe)
    with folder.claim():
        settle(folder, report)
        ((_, _, word, _),) = standings(folder, report, [run.path.name])
        if word == "done":
            report(f"{run.path} is done. For another like it: repeat={recipe.repeat + 1}")
            return None
        if word in ("queued", "running"):
            cure = f"wait for its end, or titanlab cancel {sweep_argument(folder.path)}"
            raise ConfigError("run", run.path.name, f"is {word} already", cure)
        check_jobs([item])
        renamed: list[Place] = []
        with run.claim():
            if checkpoint is not None:
                renamed = go_back(run, recipe, checkpoint, report)
            else:
                pass_over_damaged(run, recipe, report)
                if (missed := missed_checkpoint(run)) is not None:
                    report(missed)
        try:
            (submission,) = enqueue(folder, [item], report)
        except BaseException:
            put_back(renamed)
            raise
    wake(folder)
    return submission
