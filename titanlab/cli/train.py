"""`titanlab train …`: compose a recipe with Hydra and run it, here or where `launch` says; with -m several."""

from __future__ import annotations

import os
from collections.abc import Sequence

from titanlab.cli.compose import compose_one
from titanlab.launch.launchers import joined
from titanlab.recipe.composition.flags import read_flags
from titanlab.terminal.console import Console


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code of the first run that did not end well, or 0."""
    flags = read_flags(arguments)
    if not flags.starts:
        from titanlab.cli.hydra_answers import answer

        answer(flags)
        return 0
    recipe = compose_one(flags)
    if recipe is not None and (recipe.launch.starts_directly or joined(os.environ) is not None):
        # Imported here: for `--cfg job`, and to refuse a mistake, nothing of it is needed.
        from titanlab.launch.execute import execute, prepare

        with Console() as console:
            (ready,) = prepare([recipe], console.note)
            return execute(ready, console).kind.exit_code
    # Imported here: a single run on this host needs nothing of sweeps.
    from titanlab.cli.sweep import Given, run_study

    if recipe is not None:
        # A study of one point.
        return run_study(Given(rest=tuple(arguments)))
    # What was typed for one command is meant as a whole: a point that cannot be run is a mistake.
    return run_study(Given(rest=tuple(arguments), wait=True, whole=True))
