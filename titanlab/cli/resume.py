"""`titanlab resume RUN`: continue a run that was stopped, in its folder, under the same or another layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from titanlab.checkpoint.folders import latest
from titanlab.cli.arguments import Arguments
from titanlab.composition.errors import value_error
from titanlab.console import Console
from titanlab.errors import ConfigError
from titanlab.execute import continue_run, prepare
from titanlab.launch.local_schema import Local
from titanlab.options import discover, implementation
from titanlab.recipe import Recipe, from_mapping
from titanlab.run_search import find_run

# What may change between attempts: how a run is run and watched. What it computes may not.
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
)


def main(arguments: Sequence[str]) -> int:
    """Begin the run's next attempt. Returns its outcome's exit code."""
    parser = Arguments("resume", "Continue a run that was stopped.")
    parser.add_argument("run", help="the run's folder, name, or the first digits of its hash")
    parser.add_argument("overrides", nargs="*", default=[], help="key=value, such as parallelism.shard=4")
    parser.add_argument("--runs", default="runs", help="the folder of runs (default runs)")
    given = parser.parse_args(arguments)
    run = find_run(given.run, given.runs)
    recipe = _changed(run.config(), given.overrides)
    # It may have moved since it was born; and a queue is `titanlab retry`'s, this verb runs here.
    recipe = replace(recipe, runs=str(run.path.parent.parent))
    if not hasattr(implementation(recipe.launch), "start"):
        recipe = replace(recipe, launch=Local(threads=getattr(recipe.launch, "threads", None)))
    with Console() as console:
        (ready,) = prepare([recipe], console.note, started=latest(run.checkpoints) is not None)
        return continue_run(run, ready.recipe, ready.host, ready.ranks, console).kind.exit_code


def _changed(config: dict[str, Any], overrides: Sequence[str]) -> Recipe:
    for override in overrides:
        _hold_changeable(override)
    keys = [override.partition("=")[0] for override in overrides]
    if any(key.startswith("parallelism.") for key in keys):
        # The degrees decide, unless the world is given too.
        config = {**config, "world": None}
    try:
        merged = OmegaConf.merge(OmegaConf.create(config), OmegaConf.from_dotlist(list(overrides)))
    except (OmegaConfBaseException, YAMLError) as error:
        rule = f"cannot be read ({str(error).splitlines()[0]})"
        raise ConfigError("overrides", " ".join(overrides), rule, "write key=value") from error
    changed: dict[str, Any] = OmegaConf.to_container(merged)  # type: ignore[assignment]
    try:
        return from_mapping(changed)
    except ConfigError as error:
        cause = error.__cause__
        if isinstance(cause, OmegaConfBaseException) and any(key.startswith(error.key) for key in keys):
            # A person typed the key just now, and is told what it takes.
            raise value_error(cause, overrides) from error
        raise


def _hold_changeable(override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals:
        raise ConfigError("overrides", override, "is no override", "write key=value")
    if key in discover():
        rule = "is another preset, and a run that has begun has values"
        raise ConfigError(key, value, rule, f"give keys of {key}, such as parallelism.shard=2")
    if not any(key == name or (name.endswith(".") and key.startswith(name)) for name in CHANGEABLE):
        allowed = ", ".join(name.removesuffix(".") for name in CHANGEABLE)
        raise ConfigError(key, value, "is not to be changed in a run that has begun", f"changeable: {allowed}")
