"""Verbs that continue from a run: `titanlab resume RUN`, `titanlab train --from RUN`, `titanlab retry SWEEP`."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from titanlab.checkpoint import Place, checkpoints_of, find_run_or_checkpoint, latest, of_step, parent_of, step_of
from titanlab.cli.arguments import FROM
from titanlab.data import source
from titanlab.errors import ConfigError
from titanlab.launch import continue_run, directly, joined, launch_of, prepare
from titanlab.launch.execute import execute
from titanlab.recipe import LAYOUT, Recipe, adapted, check_unedited, from_mapping, next_recipe, to_mapping
from titanlab.records import OutcomeKind, RunFolder, config_text, create_run, identify
from titanlab.sweep import FAILED, checked, open_sweep, resubmit, submitted_with
from titanlab.sweep.retry import retry
from titanlab.system import Console, counted, harmless_lines, shown_path, sweep_argument
from titanlab.techniques.optimizer.contract import rate_factor
from titanlab.train import check_beginning

# Keys that say where the data is. A resumed run may change these if the content is the same.
_PLACES = ("data.files", "data.folder", "data.path", "data.data_files", "data.tokenizer")
# The keys that may change between attempts. They do not change what the run computes.
CHANGEABLE = (
    *_PLACES,
    *LAYOUT,
    *("notes", "model.fused", "cluster.", "launch.", "tracker."),
    *("checkpoint.kind", "checkpoint.every", "checkpoint.minutes", "checkpoint.keep", "checkpoint.keep_every"),
    *("checkpoint.at_end", "checkpoint.last", "checkpoint.last_dtype"),
    *("training.log_every", "training.validate_every", "training.validation_sequences", "training.unmeasured_steps"),
    *("training.gc_every", "training.step_timeout_seconds", "training.first_step_timeout_seconds"),
    *("training.on_nan", "training.nan_limit", "training.check_every", "training.compare_ranks_every"),
)
# Keys that --from sets, and that the user must not set.
_FIXED = ("checkpoint.load_from", "init_from", "init_from_exclude", "runs")


def resume_verb(args: Namespace) -> int:
    """Run the next attempt. Returns the exit code of its outcome."""
    run, checkpoint = find_run_or_checkpoint(args.run, args.runs)
    if args.step is not None:
        if checkpoint is not None:
            raise ConfigError("--step", args.step, f"{checkpoint} is of one step", "leave one of the two out")
        checkpoint = of_step(checkpoints_of(run), args.step, "--step", args.step)
    done = run.result()
    if checkpoint is not None and done is not None and done.kind is OutcomeKind.DONE:
        rule = f"is a checkpoint of a run that is done: {counted(done.steps or 0, 'step')}"
        shown = shown_path(checkpoint)
        raise ConfigError("checkpoint", shown, rule, f"for a new run from there: titanlab train --from {shown}")
    newest = checkpoint or latest(checkpoints_of(run))
    anew = f"titanlab train --from {shown_path(run.path)}"
    with Console() as console:
        console.phase("checking the recipe and its data")
        check_unedited(run)
        config = run.config()
        if (launch := submitted_with(run)) is not None:
            config["launch"] = dict(launch)
        recipe = next_recipe(config, args.overrides, CHANGEABLE, file=run.path / "config.yaml", branch=anew)
        recipe, line = adapted(recipe, from_mapping(config), args.overrides)
        if line:
            console.note(line)
        # Use the present folder of runs: the run may have been moved.
        recipe = replace(recipe, runs=str(run.path.parent.parent))
        if not recipe.launch.starts_directly and joined(os.environ) is None:
            if resubmit(run, recipe, console.note, checkpoint=checkpoint) is not None:
                sweep = sweep_argument(run.path.parent)
                console.note(f"next: titanlab status {sweep} --watch; to run it here instead: launch=local")
            return 0
        recipe = replace(recipe, launch=directly(launch_of(recipe)))
        (ready,) = prepare([recipe], console.note, started=newest is not None)
        places = [override.split("=", 1) for override in args.overrides if override.startswith(_PLACES)]
        identity = run.identity()
        if places and identity is not None and identity.content["data"] != ready.identity.content["data"]:
            (key, value), *_ = places
            has = "other content, or files whose paths sort in another order"
            rule = f"is other data than the run has begun with: {has}"
            raise ConfigError(key, value, rule, f"for a new run with it: {anew} {key}={value}")
        ended = continue_run(run, ready.recipe, ready.ranks, console, checkpoint=checkpoint)
    return ended.kind.exit_code


def train_from(args: Namespace) -> int:
    """Train the new run, here or with its launcher. Returns the exit code of its outcome, 0 after a submission."""
    parent, checkpoint = find_run_or_checkpoint(args.run, args.runs, FROM)
    checkpoint = checkpoint or latest(checkpoints_of(parent))
    if checkpoint is None:
        raise ConfigError(FROM, args.run, "has no checkpoint", "train it until it has saved one, or begin without it")
    with Console() as console:
        console.phase("composing the recipe")
        recipe, lines = _branched(parent, checkpoint, args.overrides)
        if args.cfg is not None:
            check_beginning(checked(recipe))
            console.phase(None)
            text = config_text(to_mapping(recipe))
            sys.stdout.write(harmless_lines(text) if sys.stdout.isatty() else text)
            return 0
        for line in filter(None, lines):
            console.note(line)
        if recipe.launch.starts_directly or joined(os.environ) is not None:
            (ready,) = prepare([recipe], console.note)
            return execute(ready, console).kind.exit_code
        return _submitted(recipe, console)


def _branched(parent: RunFolder, checkpoint: Place, overrides: Sequence[str]) -> tuple[Recipe, list[str]]:
    """The recipe of the new run, and lines about it for the user."""
    check_unedited(parent)
    config = parent.config()
    for key, _, value in (override.partition("=") for override in overrides):
        if key in _FIXED:
            raise ConfigError(key, value, f"follows from {FROM}", "leave it out")
    # Resolve links: the path is part of the new run's identity, and must be the same at the next start.
    start = {"load_from": str(checkpoint.resolve() if isinstance(checkpoint, Path) else checkpoint)}
    begun = {**config, "init_from": None, "init_from_exclude": [], "checkpoint": {**config["checkpoint"], **start}}
    before = from_mapping(config)
    recipe = next_recipe(begun, overrides, None, file=parent.path / "config.yaml")
    recipe, line = adapted(recipe, before, overrides)
    # The schedule spans all steps of the new run, also those of its parent.
    step, steps, steps_before = step_of(checkpoint), recipe.training.steps, before.training.steps
    had = before.optimizer.lr * rate_factor(before.optimizer.schedule, step=step, steps=steps_before)
    gets = recipe.optimizer.lr * rate_factor(recipe.optimizer.schedule, step=min(step + 1, steps), steps=steps)
    rates = f"step {step} had {had:.3g}, step {step + 1} gets {gets:.3g}"
    begin = f"new run from step {step} of {parent.sweep}/{parent.path.name}"
    spans = f"learning rate: the schedule spans steps 1 to {steps} (before: 1 to {steps_before}); {rates}"
    return replace(recipe, runs=str(parent.path.parent.parent)), [begin, spans, line]


def _submitted(recipe: Recipe, console: Console) -> int:
    recipe = checked(recipe)
    check_beginning(recipe)
    source.prepare(recipe.data, report=console.note)
    data, hardware = source.fingerprint(recipe.data), str(recipe.cluster.device)
    identity = identify(recipe, data=data, hardware=hardware, repeat=recipe.repeat)
    parent, config = parent_of(recipe.checkpoint.load_from), to_mapping(recipe)
    names = {"sweep": recipe.sweep, "name": recipe.name}
    run = create_run(recipe.runs, **names, identity=identity, config=config, parent=parent)
    if resubmit(run, recipe, console.note) is not None:
        console.note(f"next: titanlab status {sweep_argument(run.path.parent)} --watch")
    return 0


def retry_verb(args: Namespace) -> int:
    """Submit runs again, and print which. Returns 0, also if there is nothing to submit."""
    if args.outcome and args.all_failed:
        raise ConfigError("--outcome", args.outcome, "is included in --all-failed", "leave one of the two out")
    outcomes = [word.strip() for word in args.outcome.split(",") if word.strip()]
    folder = open_sweep(args.sweep, args.runs)
    with Console() as console:
        done = retry(
            folder,
            console.note,
            outcomes=FAILED if args.all_failed else outcomes,
            stale=args.stale,
            names=[text for text in args.runs_and_keys if "=" not in text],
            overrides=[text for text in args.runs_and_keys if "=" in text],
            dry_run=args.dry_run,
        )
        for chosen in done if args.dry_run else ():
            outcome = chosen.outcome or "never started"
            console.note(f"{chosen.run}: {outcome}{', anew' if args.stale else ''}")
        named, runs = sweep_argument(folder.path), counted(len(done), "run")
        if not done:
            console.note(f"nothing of {folder.name} is to be done again; titanlab status {named} shows its runs")
        elif args.dry_run:
            console.note(f"{runs} would be submitted")
        else:
            console.note(f"{runs} submitted; titanlab status {named} --watch follows them")
    return 0
