"""Verbs that go on from a run: `titanlab resume RUN`, `titanlab train --from RUN`, `titanlab retry SWEEP`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from titanlab.checkpoint.address_schema import Place
from titanlab.checkpoint.contents import parent_of
from titanlab.checkpoint.folders import checkpoints_of, find_run_or_checkpoint, latest, of_step, step_of
from titanlab.cli.arguments import Arguments
from titanlab.data import source
from titanlab.errors import ConfigError
from titanlab.launch.contract import launch_of
from titanlab.launch.execute import continue_run, execute, prepare
from titanlab.launch.launchers import directly, joined
from titanlab.recipe.next_attempt import LAYOUT, adapted, check_unedited, new_recipe, next_recipe
from titanlab.recipe.recipe import Recipe, from_mapping, to_mapping
from titanlab.records.identity import identify
from titanlab.records.outcome import OutcomeKind
from titanlab.records.run_folder import RunFolder, create_run
from titanlab.sweep.enqueue import checked
from titanlab.sweep.retry import FAILED, RetriedRun, resubmit, retry, submitted_with
from titanlab.sweep.sweep_folder import SweepFolder, open_sweep
from titanlab.system.terminal import Console
from titanlab.system.text import counted, shown_path, sweep_argument
from titanlab.techniques.optimizer.contract import rate_factor
from titanlab.train.starting_weights import check_beginning

# Where the data is: what is there must be the same.
_PLACES = ("data.files", "data.folder", "data.path", "data.data_files", "data.tokenizer")
# The keys that may change between attempts. They do not change what the run computes.
CHANGEABLE = (
    *_PLACES,
    *LAYOUT,
    "model.fused",
    "cluster.",
    "launch.",
    "tracker.",
    "checkpoint.kind",
    "checkpoint.every",
    "checkpoint.minutes",
    "checkpoint.keep",
    "checkpoint.keep_every",
    "checkpoint.at_end",
    "checkpoint.last",
    "checkpoint.last_dtype",
    "training.log_every",
    "training.validate_every",
    "training.validation_sequences",
    "training.unmeasured_steps",
    "training.gc_every",
    "training.step_timeout_seconds",
    "training.first_step_timeout_seconds",
    "training.on_nan",
    "training.nan_limit",
    "training.check_every",
    "training.compare_ranks_every",
)


def resume_verb(arguments: Sequence[str]) -> int:
    """Run the next attempt. Returns the exit code of its outcome."""
    parser = Arguments("resume", "Continue a run that was stopped.")
    parser.add_argument(
        "run", help="the run's folder, name, or the first digits of its hash; or one of its checkpoints"
    )
    parser.add_argument("overrides", nargs="*", default=[], help="key=value, such as parallelism.shard=4")
    parser.add_argument("--step", type=int, help="of the checkpoint to resume from (default: the newest)")
    parser.add_argument("--runs", default="runs", help="the folder of runs (default runs)")
    args = parser.parse_args(arguments)
    run, checkpoint = find_run_or_checkpoint(args.run, args.runs)
    if args.step is not None:
        if checkpoint is not None:
            raise ConfigError("--step", args.step, f"{checkpoint} is of a step already", "leave one of the two out")
        checkpoint = of_step(checkpoints_of(run), args.step, "--step", args.step)
    done = run.result()
    if checkpoint is not None and done is not None and done.kind is OutcomeKind.DONE:
        rule = f"is a checkpoint of a run that is done: {counted(done.steps or 0, 'step')}"
        shown = shown_path(checkpoint)
        raise ConfigError("checkpoint", shown, rule, f"for a new run from there: titanlab train --from {shown}")
    newest = checkpoint or latest(checkpoints_of(run))
    with Console() as console:
        console.phase("checking the recipe and its data")
        recipe = _changed(run, args.overrides, console)
        if not recipe.launch.starts_directly and joined(os.environ) is None:
            if resubmit(run, recipe, console.note, checkpoint=checkpoint) is not None:
                sweep = sweep_argument(run.path.parent)
                console.note(f"next: titanlab status {sweep} --watch; to run it here instead: launch=local")
            return 0
        recipe = replace(recipe, launch=directly(launch_of(recipe)))
        (ready,) = prepare([recipe], console.note, started=newest is not None)
        _check_data(run, ready.identity.content["data"], args.overrides)
        ended = continue_run(run, ready.recipe, ready.host, ready.ranks, console, checkpoint=checkpoint)
    return ended.kind.exit_code


def _check_data(run: RunFolder, fingerprint: str, overrides: Sequence[str]) -> None:
    """Check that the data of another place is the run's, before anything starts."""
    places = [override.split("=", 1) for override in overrides if override.startswith(_PLACES)]
    identity = run.identity()
    if places and identity is not None and identity.content["data"] != fingerprint:
        (key, value), *_ = places
        rule = "is other data than the run has begun with: other content, or files whose paths sort in another order"
        cure = f"for a new run with it: titanlab train --from {shown_path(run.path)} {key}={value}"
        raise ConfigError(key, value, rule, cure)


def _changed(run: RunFolder, overrides: Sequence[str], console: Console) -> Recipe:
    """The recipe of the next attempt."""
    check_unedited(run)
    config, branch = run.config(), f"titanlab train --from {shown_path(run.path)}"
    if (launch := submitted_with(run)) is not None:
        config["launch"] = dict(launch)
    recipe = next_recipe(config, overrides, CHANGEABLE, file=run.path / "config.yaml", branch=branch)
    recipe, line = adapted(recipe, from_mapping(config), overrides)
    if line:
        console.note(line)
    # The run's folder may have moved.
    return replace(recipe, runs=str(run.path.parent.parent))


FLAG = "--from"
# What the new run has from its checkpoint.
_FIXED = ("checkpoint.load_from", "init_from", "runs")


def train_from(arguments: Sequence[str]) -> int:
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


def retry_verb(arguments: Sequence[str]) -> int:
    """Submit runs again, and print which. Returns 0, also if there is nothing to submit."""
    parser = Arguments("retry", "Put ended runs of a sweep back into the queue; they go on from their checkpoints.")
    parser.add_argument("sweep", help="the sweep's name, or its folder")
    parser.add_argument(
        "runs_and_keys",
        nargs="*",
        metavar="RUN | launch.KEY=VALUE",
        default=[],
        help="runs by folder, label or first digits of the hash (default: all); keys of launch, and cluster.nodes and "
        "cluster.per_node, for the new jobs",
    )
    parser.add_argument("--outcome", default="", help="those that have ended so: hang,node_fail")
    parser.add_argument("--all-failed", action="store_true", help="those that have ended otherwise than done")
    parser.add_argument("--stale", action="store_true", help="those that other code has made, which start anew")
    parser.add_argument("--dry-run", action="store_true", help="say which they are, and submit nothing")
    parser.add_argument("--runs", default="runs", help="the folder of runs (default runs)")
    args = parser.parse_args(arguments)
    if args.outcome and args.all_failed:
        raise ConfigError("--outcome", args.outcome, "is one of those of --all-failed", "leave one of the two out")
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
        _report(console, folder, done, dry_run=args.dry_run)
    return 0


def _report(console: Console, folder: SweepFolder, done: Sequence[RetriedRun], *, dry_run: bool) -> None:
    if dry_run:
        for chosen in done:
            outcome = chosen.outcome or "never started"
            console.note(f"{chosen.run.path.name}: {outcome}{', anew' if chosen.anew else ''}")
    count = len(done)
    named = sweep_argument(folder.path)
    runs = "1 run" if count == 1 else f"{count} runs"
    if not count:
        console.note(f"nothing of {folder.name} is to be done again; titanlab status {named} shows its runs")
    elif dry_run:
        console.note(f"{runs} would be submitted")
    else:
        console.note(f"{runs} submitted; titanlab status {named} --watch follows them")
