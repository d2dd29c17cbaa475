"""Composes recipes from `key=value` arguments."""

from __future__ import annotations

from collections.abc import Sequence

from titanlab.recipe.compose import Loader
from titanlab.recipe.flags import Flags, read_flags
from titanlab.recipe.recipe import Recipe


def compose(arguments: Sequence[str]) -> list[Recipe]:
    """The recipes that the arguments describe: one, or all points of a sweep in their order.

    The list is empty if the arguments make Hydra print something: `--cfg`, `--info`, `--help`, completion.

    Raises:
        ConfigError: the arguments describe no recipe, or a point of the sweep is no valid recipe.
    """
    flags = read_flags(arguments)
    if not flags.starts:
        from titanlab.cli.answers import answer

        answer(flags)
        return []
    if composition := compose_one(flags):
        return [composition[1]]
    # Imported here, because a single run needs no code for sweeps.
    from titanlab.sweep.composer import Composer
    from titanlab.sweep.request import read_request

    request = read_request(arguments)
    composer = Composer(request.loader, request.points)
    return [composer.recipe(point) for point in request.points]


def compose_one(flags: Flags) -> tuple[Loader, Recipe] | None:
    """The recipe that a command line describes, with the loader that composed it; None if it asks for several.

    Raises:
        ConfigError: the command line describes no recipe.
    """
    keys = {override.partition("=")[0].lstrip("+") for override in flags.overrides}
    if flags.multirun or "sweeps" in keys:
        return None
    loader = Loader(flags, flags.overrides)
    recipe = loader.recipe()
    return None if recipe is None else (loader, recipe)
