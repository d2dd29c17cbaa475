"""`titanlab resume RUN`: continue a run that was stopped, in its folder, under the same or another layout."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from titanlab.cli.arguments import Arguments
from titanlab.console import Console
from titanlab.errors import ConfigError
from titanlab.execute import continue_run, prepare
from titanlab.recipe import from_mapping
from titanlab.run_search import find_run

# What may change between attempts: how a run is run and watched. What it computes may not.
CHANGEABLE = (
    "world",
    "parallelism.",
    "cluster.",
    "launch.",
    "tracker.",
    "checkpoint.",
    "training.microbatch",
    "training.log_every",
    "training.validate_every",
    "training.validation_sequences",
    "training.gc_every",
)


def main(arguments: Sequence[str]) -> int:
    """Begin the run's next attempt. Returns its outcome's exit code."""
    parser = Arguments("resume", "Continue a run that was stopped.")
    parser.add_argument("run", help="the run's folder, name, or the first digits of its hash")
    parser.add_argument("overrides", nargs="*", help="key=value, such as world=4 parallelism.shard=4")
    parser.add_argument("--runs", default="runs", help="the folder of runs (default runs)")
    given = parser.parse_args(arguments)
    run = find_run(given.run, given.runs)
    recipe = from_mapping(_changed(run.config(), given.overrides))
    with Console() as console:
        ready = prepare(recipe, console.note)
        return continue_run(run, ready.recipe, ready.host, ready.ranks, console).kind.exit_code


def _changed(config: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    keys = [override.partition("=")[0] for override in overrides]
    for override, key in zip(overrides, keys, strict=True):
        if "=" not in override or not key.startswith(CHANGEABLE):
            allowed = ", ".join(name.rstrip(".") for name in CHANGEABLE)
            raise ConfigError(
                key,
                override.partition("=")[2],
                "is not to be changed in a run that has begun",
                f"changeable: {allowed}",
            )
    if any(key.startswith("parallelism.") for key in keys) and "world" not in keys:
        # The degrees decide, unless the world is given too.
        config = {**config, "world": int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else None}
    try:
        merged = OmegaConf.merge(OmegaConf.create(config), OmegaConf.from_dotlist(list(overrides)))
    except OmegaConfBaseException as error:
        raise ConfigError("overrides", " ".join(overrides), str(error).splitlines()[0], "write key=value") from error
    changed: dict[str, Any] = OmegaConf.to_container(merged)  # type: ignore[assignment]
    return changed
