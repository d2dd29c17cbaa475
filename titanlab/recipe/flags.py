"""Parses Hydra's flags before Hydra does: an error in a flag is one line, and flags may stand between overrides."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass

from titanlab.errors import ConfigError
from titanlab.recipe import strangers
from titanlab.recipe.hydra_errors import ARGUMENTS, HELP
from titanlab.recipe.hydra_internal import flag_parser
from titanlab.system import home

# Flags that make Hydra print something instead of running; it obeys only one of them at a time.
_ANSWERS = ("help", "hydra_help", "cfg", "info", "shell_completion")


@dataclass(frozen=True, kw_only=True)
class Flags:
    """The parsed command line.

    Attributes:
        overrides: `key=value` and other overrides, in the given order.
        flags: all other arguments, in the given order.
        values: the values of `--config-dir`, `--config-name` and `--config-path`, by flag.
        answer: what Hydra prints in place of a run: help, hydra_help, cfg, info or shell_completion; None: nothing.
        multirun: whether -m is given.
    """

    overrides: list[str]
    flags: list[str]
    values: dict[str, str | None]
    answer: str | None
    multirun: bool


def read_flags(arguments: Sequence[str]) -> Flags:
    """Read the command line of a verb that takes a recipe.

    Raises:
        ConfigError: a flag is unknown or lacks its value, flags exclude each other, or an override sets what no recipe
            may set.
    """
    try:
        options, unknown = flag_parser().parse_known_intermixed_args(list(arguments))
    except argparse.ArgumentError as error:
        raise _bad_flag(error, arguments) from error
    # argparse puts unknown arguments that begin with a dash here; overrides never begin with one.
    if unknown:
        raise ConfigError(ARGUMENTS, " ".join(unknown), "is no flag of this verb", HELP)
    _check_together(options, arguments)
    strangers.check_overrides(options.overrides)
    left, flags = list(options.overrides), list[str]()
    for argument in arguments:
        (left.remove if argument in left else flags.append)(argument)
    return Flags(
        overrides=[_with_home(override) for override in options.overrides],
        flags=flags,
        values={f"--config-{name}": getattr(options, f"config_{name}") for name in ("dir", "name", "path")},
        answer=next((name for name in _ANSWERS if getattr(options, name)), None),
        multirun=options.multirun,
    )


def _check_together(options: argparse.Namespace, arguments: Sequence[str]) -> None:
    if options.resolve and not (options.cfg or options.help):
        raise ConfigError(ARGUMENTS, "--resolve", "goes with --cfg", "try --cfg job --resolve")
    if options.package is not None and not options.cfg:
        raise ConfigError("--package", options.package, "goes with --cfg", f"try --cfg job --package {options.package}")
    if options.experimental_rerun is not None:
        # Hydra would unpickle the file, which can run any code.
        rule = "a run is not repeated from a pickle"
        raise ConfigError("--experimental-rerun", options.experimental_rerun, rule, "try titanlab resume RUN")
    if options.shell_completion and "query=bash" not in options.overrides:
        # Hydra's script registers the first word of the command, `titanlab`, and so replaces the completion of all
        # verbs.
        rule, cure = "would replace the completion of all verbs", 'try eval "$(titanlab completion bash)"'
        raise ConfigError("--shell-completion", " ".join(options.overrides), rule, cure)
    modes = [name for name in ("run", "multirun", *_ANSWERS[2:]) if getattr(options, name) not in (None, False)]
    if len(modes) > 1:
        named = " and ".join(f"--{name.replace('_', '-')}" for name in modes)
        raise ConfigError(ARGUMENTS, " ".join(arguments), f"{named} do not go together", "choose one of them")


def _bad_flag(error: argparse.ArgumentError, arguments: Sequence[str]) -> ConfigError:
    names = (error.argument_name or ARGUMENTS).split("/")
    places = [place for place, argument in enumerate(arguments) if argument.partition("=")[0] in names]
    place = places[0] if places else len(arguments)
    value = arguments[place].partition("=")[2] if places and "=" in arguments[place] else ""
    value = value or " ".join(arguments[place + 1 : place + 2])
    return ConfigError(names[0], value, re.sub(r"\s+", " ", error.message), HELP)


def _with_home(override: str) -> str:
    """The override with `~` replaced by the home folder: not every shell does this, and Hydra rejects `~`."""
    key, equals, value = override.partition("=")
    folder = home() if equals and (value == "~" or value.startswith("~/")) else None
    return override if folder is None else f"{key}={folder}{value[1:]}"
