"""Submits the next attempt of one run through a launcher, under the layout that its recipe gives it now."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from titanlab.checkpoint.folders import put_back
from titanlab.checkpoint.remote.address_schema import Place
from titanlab.distributed.host import check_host, this_host
from titanlab.errors import ConfigError
from titanlab.launch.attempt import go_back, missed_checkpoint, pass_over_damaged
from titanlab.launch.contract import launch_of
from titanlab.launch.shape import check_cluster, shape_of
from titanlab.launch.submission import Submission
from titanlab.recipe.composition.next_attempt import changes
from titanlab.recipe.memory_rules import check_host_memory
from titanlab.recipe.recipe import Recipe, resolve, to_mapping
from titanlab.recipe.recipe_rules import check_all_but_data
from titanlab.records.run_folder import RunFolder
from titanlab.sweep.enqueue import Item, check_jobs, enqueue, settle, wake
from titanlab.sweep.queue import silence
from titanlab.sweep.reconcile import reconcile
from titanlab.sweep.standing import standing
from titanlab.sweep.sweep_folder import SweepFolder, jobs_of
from titanlab.terminal.paths import sweep_argument


def checked(recipe: Recipe) -> Recipe:
    """The resolved recipe of a job, after every check that a new run's passes before it is submitted.

    Raises:
        ConfigError: a rule is broken.
    """
    cluster, launch = recipe.cluster, recipe.launch
    if launch.runs_here:
        host = this_host()
        recipe = resolve(recipe, world=None, accelerator=host.accelerator, device=host.device)
    else:
        check_cluster(cluster, launch)
        recipe = resolve(recipe, world=None, accelerator=cluster.accelerator, device=cluster.device or "cpu")
    check_all_but_data(recipe)
    if launch.runs_here:
        cluster, processes = recipe.cluster, recipe.layout.world
        check_host(host, accelerator=cluster.accelerator, device=cluster.device, processes=processes)
        check_host_memory(recipe, host, processes=processes)
    return recipe


def item_of(run: RunFolder, recipe: Recipe) -> Item:
    """The job of a run with a checked recipe."""
    changed = changes(run.config(), to_mapping(recipe))
    return Item(run=run.path.name, shape=shape_of(recipe), launch=launch_of(recipe), changes=changed)


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
        recipe: of the attempt, with the launcher that gets it.
        report: called with a line for each action.
        checkpoint: an older checkpoint to resume from; later ones are renamed at once.

    Raises:
        ConfigError: a rule is broken, the run waits or runs already, or the launcher refuses; nothing was submitted.
    """
    folder = SweepFolder(run.path.parent.absolute())
    recipe = checked(recipe)
    item = item_of(run, recipe)
    with folder.claim():
        settle(folder, report)
        states = reconcile(folder)
        if (problem := silence(states)) is not None:
            report(problem)
        word, _ = standing(run, jobs_of(folder, folder.submissions()).get(run.path.name), states)
        if word == "done":
            report(f"{run.path} is done. For another like it: repeat={recipe.repeat + 1}")
            return None
        if word in ("queued", "running"):
            rule = f"is {word} already"
            raise ConfigError(
                "run", run.path.name, rule, f"wait for its end, or titanlab cancel {sweep_argument(folder.path)}"
            )
        check_jobs([(item.launch, item.shape)])
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
