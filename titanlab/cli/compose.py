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

from titanlab.errors import ConfigError
from titanlab.recipe import (
    ARGUMENTS,
    HELP,
    VERSION_BASE,
    Flags,
    Loader,
    Recipe,
    as_typed,
    composition_errors,
    conf_folder,
    read_flags,
    register,
    with_combination,
)
from titanlab.system import harmless_lines

# The parts of Hydra's help about flags that titanlab refuses.
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
    if flags.options.multirun or "sweeps" in keys:
        return None
    loader = Loader(flags, flags.overrides)
    recipe = loader.recipe()
    return None if recipe is None else (loader, recipe)


def answer(flags: Flags) -> None:
    """Print what Hydra prints for flags that start nothing.

    Raises:
        ConfigError: Hydra fails, or training would refuse the config.
    """
    register()
    if flags.answer in ("cfg", "info"):
        loader = Loader(flags, flags.overrides)
        loader.recipe()
    if flags.answer == "cfg":
        options = flags.options
        config = loader.text(options.cfg, package=options.package, resolve=options.resolve)
        if config is None:
            rule = f"package '{options.package}' not found in config"
            raise ConfigError(ARGUMENTS, " ".join([*flags.overrides, *flags.flags]), rule, HELP)
        # Only a terminal needs harmless text: a config in a file is read again, so it must stay unchanged.
        sys.stdout.write(harmless_lines(config) if sys.stdout.isatty() else config)
        return
    # Hydra raises its errors instead of printing them.
    full_error, os.environ["HYDRA_FULL_ERROR"] = os.environ.get("HYDRA_FULL_ERROR"), "1"
    # Hydra's loggers would print a traceback on a full disk, so its output is captured, and written at the end.
    output, errors, arguments = io.StringIO(), io.StringIO(), sys.argv
    try:
        with composition_errors(flags.overrides, flags.values):
            overrides = [as_typed(with_combination(override)) for override in flags.overrides]
            sys.argv = ["titanlab train", *overrides, *flags.flags]
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
                # With these flags, Hydra never calls the decorated function, which is `print` here.
                hydra.main(config_path=str(conf_folder()), config_name="config", **VERSION_BASE)(print)()
    except SystemExit as end:
        if end.code not in (None, 0):
            lines = errors.getvalue().strip().splitlines() or ["Hydra gave up"]
            raise ConfigError(ARGUMENTS, " ".join(sys.argv[1:]), lines[-1], HELP) from end
    finally:
        sys.argv = arguments
        del os.environ["HYDRA_FULL_ERROR"]
        if full_error is not None:
            os.environ["HYDRA_FULL_ERROR"] = full_error
        text = output.getvalue()
        if _REFUSED.search(text) is not None:
            text = _REFUSED.sub("", text) + _COMPLETION
        sys.stdout.write(harmless_lines(text))
    sys.stderr.write(harmless_lines(errors.getvalue()))
