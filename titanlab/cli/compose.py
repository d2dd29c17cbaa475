"""Composes recipes from `key=value` arguments, and calls Hydra for its flags that start no run.

Those flags are `--cfg`, `--info`, `--help`, `--hydra-help` and the shell's completion.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Sequence

import hydra
from omegaconf import DictConfig

from titanlab.errors import ConfigError
from titanlab.recipe import (
    ARGUMENTS,
    VERSION_BASE,
    Flags,
    Loader,
    Recipe,
    as_typed,
    composition_errors,
    conf_folder,
    read_flags,
    register,
    with_combinations,
)
from titanlab.system import harmless_lines

# Flags in Hydra's help that titanlab refuses, with their explanations.
_REFUSED = re.compile(r"^--(?:shell-completion,.*?\n(?=--)|experimental-rerun.*?\n)", re.MULTILINE | re.DOTALL)
_COMPLETION = 'For TAB in the shell: eval "$(titanlab completion bash)"\n'


def compose(arguments: Sequence[str]) -> list[Recipe]:
    """The recipes that the arguments describe: one, or all points of a sweep in their order.

    The list is empty if the arguments make Hydra print something: `--cfg`, `--info`, `--help`, completion.

    Raises:
        ConfigError: the arguments do not describe a recipe, or a point of the sweep is not a valid recipe.
    """
    flags = read_flags(arguments)
    if flags.answer:
        answer(flags)
        return []
    if composition := compose_one(flags):
        return [composition[1]]
    # Imported here, because a single run needs no code for sweeps.
    from titanlab.sweep import Composer, read_request

    request = read_request(arguments)
    composer = Composer(request.loader, request.points)
    return [composer.recipe(point) for point in request.points]


def compose_one(flags: Flags) -> tuple[Loader, Recipe] | None:
    """The recipe that a command line describes, with the loader that composed it; None if it asks for several.

    Raises:
        ConfigError: the command line does not describe a recipe.
    """
    keys = {override.partition("=")[0].lstrip("+") for override in flags.overrides}
    if flags.multirun or "sweeps" in keys:
        return None
    loader = Loader(flags, flags.overrides)
    recipe = loader.recipe()
    return None if recipe is None else (loader, recipe)


def answer(flags: Flags) -> None:
    """Print what Hydra prints for flags that start nothing.

    Raises:
        ConfigError: Hydra fails.
    """
    register()
    if flags.answer in ("cfg", "info"):
        # Refuse everything that training refuses.
        Loader(flags, flags.overrides).recipe()
    # Hydra raises its errors instead of printing them.
    full_error, os.environ["HYDRA_FULL_ERROR"] = os.environ.get("HYDRA_FULL_ERROR"), "1"
    # Hydra's loggers would print a traceback on a full disk, so its output is captured, and written at the end.
    output, errors, arguments = io.StringIO(), io.StringIO(), sys.argv
    try:
        with composition_errors(flags.overrides, flags.values):
            sys.argv = ["titanlab train", *map(as_typed, with_combinations(flags.overrides)), *flags.flags]
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
                hydra.main(config_path=str(conf_folder()), config_name="config", **VERSION_BASE)(_never_called)()
    except SystemExit as end:
        if end.code not in (None, 0):
            lines = errors.getvalue().strip().splitlines() or ["Hydra gave up"]
            raise ConfigError(ARGUMENTS, " ".join(sys.argv[1:]), lines[-1], "see `titanlab train --help`") from end
    finally:
        sys.argv = arguments
        del os.environ["HYDRA_FULL_ERROR"]
        if full_error is not None:
            os.environ["HYDRA_FULL_ERROR"] = full_error
        text = output.getvalue()
        if _REFUSED.search(text) is not None:
            text = _REFUSED.sub("", text) + _COMPLETION
        # A config that is written into a file is read again.
        sys.stdout.write(text if flags.answer == "cfg" and not sys.stdout.isatty() else harmless_lines(text))
    sys.stderr.write(harmless_lines(errors.getvalue()))


def _never_called(config: DictConfig) -> None:
    raise AssertionError("these flags start nothing")
