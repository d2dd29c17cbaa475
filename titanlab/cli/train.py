"""`titanlab train …`: compose a recipe with Hydra and run it, here or with a launcher; with -m several recipes."""

from __future__ import annotations

import os
from argparse import Namespace

from titanlab.system import Console, kept_imports

_DRY_RUN = ("-n", "--dry-run")


def train_verb(args: Namespace) -> int:
    """Returns the exit code of the first run that failed, or 0."""
    if args.run is not None:
        # Imported here, because a run without --from does not need it.
        from titanlab.cli.resume import train_from

        return train_from(args)
    with Console() as console:
        # Under torchrun (RANK is set), this code shows nothing: only rank 0's worker writes to the terminal. For other
        # launchers, `joined` below says whether this process is a rank.
        shown = "RANK" not in os.environ
        # If the output is not a terminal, start nothing, not even a thread, before the recipe is known to be valid.
        console.phase("composing the recipe" if shown and console.is_live else None)
        # Imported here: Hydra takes a third of a second, and the terminal must show the phase first.
        with kept_imports():
            from titanlab.cli.compose import answer, compose_one
            from titanlab.launch import joined
            from titanlab.recipe import read_flags

        rest = [word for word in args.rest if word not in _DRY_RUN]
        flags = read_flags(rest)
        if flags.answer:
            console.phase(None)
            answer(flags)
            return 0
        one = compose_one(flags)
        is_dry = len(rest) < len(args.rest)
        ranks = None if one is None else joined(os.environ)
        if one is not None and not is_dry and (one[1].launch.starts_directly or ranks is not None):
            # Imported here: neither `--cfg job` nor an error in the recipe needs it.
            with kept_imports():
                from titanlab.launch import prepare
                from titanlab.launch.execute import execute

            console.phase("checking the recipe and its data" if ranks is None and console.is_live else None)
            (ready,) = prepare([one[1]], console.note)
            if ranks is not None and ranks.rank == 0 and ranks.world > ranks.local_world:
                # Imported here: a run on one host does not need it.
                from titanlab.plan import beyond_node

                if ready.recipe.leaves_node(ranks.local_world):
                    console.note(beyond_node(ready.recipe, ranks.local_world))
            return execute(ready, console).kind.exit_code
    # Imported here, because a single run on this host needs no code for sweeps.
    from titanlab.cli.sweep import run_study

    if one is not None:
        return run_study(rest, dry_run=is_dry, loader=one[0])
    # The user typed every point of this command, so a point that cannot run is an error.
    return run_study(rest, dry_run=is_dry, wait=not is_dry, whole=True)
