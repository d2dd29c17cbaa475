"""`titanlab resume RUN`: continue a run that was stopped, in its folder, under the same or another layout.

A run that a launcher submitted goes on through that launcher; any other goes on here.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from titanlab.checkpoint.folders import latest, of_step
from titanlab.checkpoint.remote.run_place import checkpoints_of
from titanlab.checkpoint.search import find_run_or_checkpoint
from titanlab.cli.arguments import Arguments
from titanlab.errors import ConfigError
from titanlab.launch.contract import launch_of
from titanlab.launch.execute import continue_run, prepare
from titanlab.launch.launchers import directly, joined
from titanlab.recipe.composition.frozen import check_unedited
from titanlab.recipe.composition.next_attempt import LAYOUT, adapted, next_recipe
from titanlab.recipe.recipe import Recipe, from_mapping
from titanlab.records.outcome import OutcomeKind
from titanlab.records.run_folder import RunFolder
from titanlab.sweep.retry import resubmit, submitted_with
from titanlab.system.terminal import Console
from titanlab.system.text import counted, shown_path, sweep_argument

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


def main(arguments: Sequence[str]) -> int:
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
