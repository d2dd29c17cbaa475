"""`titanlab train …`: compose a recipe with Hydra and run it; with -m several, one after another."""

from __future__ import annotations

from collections.abc import Sequence

from titanlab.cli.compose import compose
from titanlab.console import Console
from titanlab.execute import execute, prepare
from titanlab.outcome import OutcomeKind


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code of the first run that did not end well, or 0.

    A run that fails does not keep the next ones from starting; one that a person stopped does.
    """
    codes: list[int] = []
    recipes = compose(arguments)
    with Console() as console:
        # All are checked before the first one starts.
        ready = prepare(recipes, console.note)
        for run in ready:
            outcome = execute(run, console)
            codes.append(outcome.kind.exit_code)
            if outcome.kind in (OutcomeKind.CANCELLED, OutcomeKind.PREEMPTED):
                break
    return next((code for code in codes if code), 0)
