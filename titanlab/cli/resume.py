"""`titanlab resume RUN`: continue a run that was stopped, in its folder, under the same or another layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from titanlab.checkpoint.folders import latest, of_step
from titanlab.checkpoint.search import find_run_or_checkpoint
from titanlab.cli.arguments import Arguments
from titanlab.errors import ConfigError
from titanlab.launch.execute import continue_run, prepare
from titanlab.launch.launchers import directly
from titanlab.recipe.composition.frozen import check_changeable, overridden
from titanlab.recipe.recipe import Recipe
from titanlab.records.run_folder import RunFolder
from titanlab.terminal.console import Console

# The keys that may change between attempts. They do not change what the run computes.
CHANGEABLE = (
    "world",
    "parallelism.",
    "cluster.",
    "launch.",
    "tracker.",
    "checkpoint.every",
    "checkpoint.keep",
    "checkpoint.at_end",
    "training.microbatch",
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
    given = parser.parse_args(arguments)
    run, checkpoint = find_run_or_checkpoint(given.run, given.runs)
    if given.step is not None:
        if checkpoint is not None:
            raise ConfigError("--step", given.step, f"{checkpoint} is of a step already", "leave one of the two out")
        checkpoint = of_step(run.checkpoints, given.step, "--step", given.step)
    recipe = _changed(run, given.overrides)
    # The run's folder may have moved. `resume` runs on this host; `titanlab retry` submits to a queue.
    recipe = replace(recipe, runs=str(run.path.parent.parent), launch=directly(recipe.launch))
    newest = checkpoint or latest(run.checkpoints)
    with Console() as console:
        (ready,) = prepare([recipe], console.note, started=newest is not None)
        ended = continue_run(run, ready.recipe, ready.host, ready.ranks, console, checkpoint=checkpoint)
    return ended.kind.exit_code


def _changed(run: RunFolder, overrides: Sequence[str]) -> Recipe:
    config = run.config()
    check_changeable(overrides, CHANGEABLE)
    if any(override.startswith("parallelism.") for override in overrides):
        # The new degrees give the world, unless the user gives it too.
        config = {**config, "world": None}
    return overridden(config, overrides, file=run.path / "config.yaml")
