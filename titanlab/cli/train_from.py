"""`titanlab train --from RUN …`: a new run from another one's checkpoint, with changes that the other's name forbids.

The new run takes model, optimizer and position in the data from the checkpoint, and the recipe from its parent.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from titanlab.checkpoint.folders import latest, step_of
from titanlab.checkpoint.parent import parent_of
from titanlab.checkpoint.remote.address_schema import Place
from titanlab.checkpoint.remote.run_place import checkpoints_of
from titanlab.checkpoint.search import find_run_or_checkpoint
from titanlab.cli.arguments import Arguments
from titanlab.data import source
from titanlab.errors import ConfigError
from titanlab.launch.execute import execute, prepare
from titanlab.launch.launchers import joined
from titanlab.optimizer.schedule import rate_factor
from titanlab.recipe.composition.frozen import check_unedited
from titanlab.recipe.composition.next_attempt import adapted, new_recipe
from titanlab.recipe.recipe import Recipe, from_mapping, to_mapping
from titanlab.records.identity import identify
from titanlab.records.run_folder import RunFolder, create_run
from titanlab.sweep.retry import checked, resubmit
from titanlab.system.terminal import Console
from titanlab.system.text import sweep_argument
from titanlab.train.starting_weights import check_beginning

FLAG = "--from"
# What the new run has from its checkpoint.
_FIXED = ("checkpoint.load_from", "init_from", "runs")


def main(arguments: Sequence[str]) -> int:
    """Train the new run, here or with its launcher. Returns the exit code of its outcome, 0 after a submission."""
    parser = Arguments("train", "Begin a new run from another run's checkpoint.")
    parser.add_argument("overrides", nargs="*", default=[], help="key=value or group=preset: training.steps=2000")
    parser.add_argument(FLAG, dest="run", required=True, help="the other run, or one of its checkpoints")
    parser.add_argument("--runs", default="runs", help="the folder of runs (default runs)")
    args = parser.parse_args(arguments)
    parent, checkpoint = find_run_or_checkpoint(args.run, args.runs, FLAG)
    checkpoint = checkpoint or latest(checkpoints_of(parent))
    if checkpoint is None:
        raise ConfigError(FLAG, args.run, "has no checkpoint", "train it until it has saved one, or begin without it")
    with Console() as console:
        console.phase("composing the recipe")
        recipe, lines = _branched(parent, checkpoint, args.overrides)
        for line in lines:
            console.note(line)
        if recipe.launch.starts_directly or joined(os.environ) is not None:
            (ready,) = prepare([recipe], console.note)
            return execute(ready, console).kind.exit_code
        return _submitted(recipe, console)


def _branched(parent: RunFolder, checkpoint: Place, overrides: Sequence[str]) -> tuple[Recipe, list[str]]:
    """The recipe of the new run, and lines for the user."""
    check_unedited(parent)
    config = parent.config()
    for override in overrides:
        key, _, value = override.partition("=")
        if key in _FIXED:
            raise ConfigError(key, value, f"follows from {FLAG}", "leave it out")
    # Not under another path the next time: the path is part of the new run's identity.
    start = {"load_from": str(checkpoint.resolve() if isinstance(checkpoint, Path) else checkpoint)}
    begun = {**config, "init_from": None, "checkpoint": {**config["checkpoint"], **start}}
    recipe = new_recipe(begun, overrides, file=parent.path / "config.yaml")
    recipe, line = adapted(recipe, from_mapping(config), overrides)
    step = step_of(checkpoint)
    lines = [
        f"new run from step {step} of {parent.sweep}/{parent.path.name}",
        _schedule_line(config, recipe, step),
        line,
    ]
    return replace(recipe, runs=str(parent.path.parent.parent)), [line for line in lines if line]


def _schedule_line(config: Mapping[str, Any], recipe: Recipe, step: int) -> str:
    """What becomes of the learning rate: the schedule spans all steps of the new run, also those of its parent."""
    before = from_mapping(config)
    steps = recipe.training.steps
    had = before.optimizer.lr * rate_factor(before.optimizer.schedule, step=step, steps=before.training.steps)
    gets = recipe.optimizer.lr * rate_factor(recipe.optimizer.schedule, step=min(step + 1, steps), steps=steps)
    return (
        f"learning rate: the schedule spans steps 1 to {steps} (before: 1 to {before.training.steps}); "
        f"step {step} had {had:.3g}, step {step + 1} gets {gets:.3g}"
    )


def _submitted(recipe: Recipe, console: Console) -> int:
    recipe = checked(recipe)
    check_beginning(recipe)
    source.prepare(recipe.data, report=console.note)
    identity = identify(
        recipe, data=source.fingerprint(recipe.data), hardware=str(recipe.cluster.device), repeat=recipe.repeat
    )
    run = create_run(
        recipe.runs,
        sweep=recipe.sweep,
        name=recipe.name,
        identity=identity,
        config=to_mapping(recipe),
        parent=parent_of(recipe.checkpoint.load_from),
    )
    if resubmit(run, recipe, console.note) is not None:
        console.note(f"next: titanlab status {sweep_argument(run.path.parent)} --watch")
    return 0
