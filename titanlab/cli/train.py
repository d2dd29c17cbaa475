"""`titanlab train …`: compose a recipe with Hydra and run it, here or where `launch` says; with -m several."""

from __future__ import annotations

import os
from collections.abc import Sequence

from titanlab.cli.compose import compose
from titanlab.cli.sweep import Given, run_study
from titanlab.launch.execute import execute, prepare
from titanlab.launch.launchers import joined
from titanlab.recipe.composition.flags import Flags, read_flags
from titanlab.terminal.console import Console


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code of the first run that did not end well, or 0."""
    flags = read_flags(arguments)
    # What was typed for one command is meant as a whole: a point that cannot be run is a mistake.
    many = Given(rest=tuple(arguments), wait=True, whole=True)
    if flags.starts and _is_sweep(flags):
        return run_study(many)
    recipes = compose(arguments)
    if not recipes:
        return 0
    if len(recipes) > 1:
        return run_study(many)
    if not recipes[0].launch.starts_directly and joined(os.environ) is None:
        # A study of one point.
        return run_study(Given(rest=tuple(arguments)))
    with Console() as console:
        (ready,) = prepare(recipes, console.note)
        return execute(ready, console).kind.exit_code


def _is_sweep(flags: Flags) -> bool:
    """Whether the command line asks for several points."""
    keys = {override.partition("=")[0].lstrip("+") for override in flags.overrides}
    return flags.multirun or "sweeps" in keys
