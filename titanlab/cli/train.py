"""`titanlab train …`: compose a recipe with Hydra and run it; with -m several, one after another."""

from __future__ import annotations

from collections.abc import Sequence

from titanlab.cli.compose import compose
from titanlab.console import Console
from titanlab.execute import execute, prepare


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code of the first run that did not end well, or 0."""
    recipes = compose(arguments)
    with Console() as console:
        # All are checked before the first one starts.
        ready = prepare(recipes, console.note)
        codes = [execute(run, console).kind.exit_code for run in ready]
    return next((code for code in codes if code), 0)
