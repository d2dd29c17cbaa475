"""From `key=value` arguments to recipes."""

from __future__ import annotations

from collections.abc import Sequence

from titanlab.recipe.composition.flags import Flags, read_flags
from titanlab.recipe.composition.loader import Loader
from titanlab.recipe.recipe import Recipe


def compose(arguments: Sequence[str]) -> list[Recipe]:
    """The recipes that the arguments describe: one, or all points of a sweep in their order.

    None where Hydra itself answers: `--cfg`, `--info`, `--help`, completion and so on.

    Raises:
        ConfigError: the arguments describe no recipe, or one of the points is none.
    """
    flags = read_flags(arguments)
    if not flags.starts:
        from titanlab.cli.hydra_answers import answer

        answer(flags)
        return []
    recipe = compose_one(flags)
    if recipe is not None:
        return [recipe]
    # Imported here: a single run needs nothing of sweeps.
    from titanlab.sweep.study.composer import Composer
    from titanlab.sweep.study.request import read_request

    request = read_request(arguments)
    composer = Composer(request.loader, request.points)
    return [composer.recipe(point) for point in request.points]


def compose_one(flags: Flags) -> Recipe | None:
    """The recipe that a command line describes; None where it asks for several.

    Raises:
        ConfigError: it describes none.
    """
    keys = {override.partition("=")[0].lstrip("+") for override in flags.overrides}
    return None if flags.multirun or "sweeps" in keys else Loader(flags, flags.overrides).recipe()
