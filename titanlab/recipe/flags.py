"""Parses Hydra's flags before Hydra does, so that errors in flags are one line and flags may stand among overrides."""

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

# Flags that make Hydra print something instead of running; Hydra obeys only one of these flags at a time.
_ANSWERS = ("help", "hydra_help", "cfg", "info", "shell_completion")


@dataclass(frozen=True, kw_only=True)
class Flags:
    """The parsed command line.

    Attributes:
        overrides: `key=value` and other overrides, in the given order.
        flags: all other arguments, in the given order.
        options: the values of Hydra's own flags.
        answer: what Hydra prints instead of a run: help, hydra_help, cfg, info or shell_completion; None: it runs.
    """

    overrides: list[str]
    flags: list[str]
    options: argparse.Namespace
    answer: str | None

    @property
    def values(self) -> dict[str, str | None]:
        """The values of `--config-dir`, `--config-name` and `--config-path`, by flag."""
        return {f"--config-{name}": getattr(self.options, f"config_{name}") for name in ("dir", "name", "path")}


def read_flags(arguments: Sequence[str]) -> Flags:
    """Read the command line of a verb that takes a recipe.

    Raises:
        ConfigError: a flag is unknown or lacks its value, flags exclude each other, or an override sets what no recipe
            may set.
    """
    try:
        options, unknown = flag_parser().parse_known_intermixed_args(list(arguments))
    except argparse.ArgumentError as error:
        names = (error.argument_name or ARGUMENTS).split("/")
        given = [place for place, argument in enumerate(arguments) if argument.partition("=")[0] in names]
        value = ""
        if given:
            value = arguments[given[0]].partition("=")[2] or " ".join(arguments[given[0] + 1 : given[0] + 2])
        raise ConfigError(names[0], value, re.sub(r"\s+", " ", error.message), HELP) from error
    # `unknown` has the flags that the parser does not know: arguments with a dash, which no override begins with.
    if unknown:
        raise ConfigError(ARGUMENTS, " ".join(unknown), "is not a flag of this verb", HELP)
    _check_together(options, arguments)
    strangers.check_overrides(options.overrides)
    left, flags, overrides = list(options.overrides), list[str](), list[str]()
    for argument in arguments:
        (left.remove if argument in left else flags.append)(argument)
    for override in options.overrides:
        # Not every shell replaces a `~` after `=` by the home folder, and Hydra rejects `~`.
        key, equals, value = override.partition("=")
        folder = home() if equals and (value == "~" or value.startswith("~/")) else None
        overrides.append(override if folder is None else f"{key}={folder}{value[1:]}")
    answer = next((name for name in _ANSWERS if getattr(options, name)), None)
    return Flags(overrides=overrides, flags=flags, options=options, answer=answer)


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
        # Hydra's completion script registers itself for the command's first word, `titanlab`: for all verbs.
        rule, cure = "would replace the completion of all verbs", 'try eval "$(titanlab completion bash)"'
        raise ConfigError("--shell-completion", " ".join(options.overrides), rule, cure)
    modes = [name for name in ("run", "multirun", *_ANSWERS[2:]) if getattr(options, name) not in (None, False)]
    if len(modes) > 1:
        named = " and ".join(f"--{name.replace('_', '-')}" for name in modes)
        raise ConfigError(ARGUMENTS, " ".join(arguments), f"{named} do not go together", "choose one of them")
