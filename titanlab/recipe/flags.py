"""Parses Hydra's flags before Hydra does, and rejects settings of Hydra that titanlab does not read.

An error in a flag is one line, and flags may stand between overrides. A setting of Hydra that titanlab does not read
would have no effect. titanlab reads `hydra.searchpath`, `hydra.sweeper` of a sweep, `hydra.job.name` (as
`${hydra:job.name}`) and the texts of the help pages. `titanlab.sweep.request` checks `hydra.launcher`, because it knows
the points.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.conf import HydraConf
from omegaconf import DictConfig, OmegaConf

from titanlab.errors import ConfigError
from titanlab.recipe import strangers
from titanlab.recipe.hydra_errors import ARGUMENTS, HELP
from titanlab.recipe.hydra_internal import flag_parser
from titanlab.records.config_file import parse_yaml
from titanlab.system.files import home

# Flags that make Hydra print something instead of running; it obeys only one of them at a time.
_ANSWERS = ("help", "hydra_help", "cfg", "info", "shell_completion")


@dataclass(frozen=True, kw_only=True)
class Flags:
    """The parsed command line.

    Attributes:
        overrides: `key=value` and other overrides, in the given order.
        flags: all other arguments, in the given order.
        values: the values of `--config-dir`, `--config-name` and `--config-path`, by flag.
        starts: whether the command starts a run; otherwise Hydra prints something.
        helps: whether titanlab's help is asked for.
        shows_config: whether the composed config is asked for.
        multirun: whether -m is given.
    """

    overrides: list[str]
    flags: list[str]
    values: dict[str, str | None]
    starts: bool
    helps: bool
    shows_config: bool
    multirun: bool


def read_flags(arguments: Sequence[str]) -> Flags:
    """Read the command line of a verb that takes a recipe.

    Raises:
        ConfigError: a flag is unknown or lacks its value, flags exclude each other, or an override names code or sets
            something that titanlab does not read.
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
    check_overrides(options.overrides)
    left = list(options.overrides)
    flags = [argument for argument in arguments if not _remove_first(argument, left)]
    return Flags(
        overrides=[_with_home(override) for override in options.overrides],
        flags=flags,
        values={
            "--config-dir": options.config_dir,
            "--config-name": options.config_name,
            "--config-path": options.config_path,
        },
        starts=not any(getattr(options, name) for name in _ANSWERS),
        helps=options.help,
        shows_config=options.cfg is not None,
        multirun=options.multirun,
    )


def _check_together(options: argparse.Namespace, arguments: Sequence[str]) -> None:
    if options.resolve and not (options.cfg or options.help):
        raise ConfigError(ARGUMENTS, "--resolve", "goes with --cfg", "try --cfg job --resolve")
    if options.package is not None and not options.cfg:
        raise ConfigError("--package", options.package, "goes with --cfg", f"try --cfg job --package {options.package}")
    if options.experimental_rerun is not None:
        # Hydra would unpickle a file, which can run any code.
        rule = "a run is not repeated from a pickle"
        raise ConfigError("--experimental-rerun", options.experimental_rerun, rule, "try titanlab resume RUN")
    if options.shell_completion and "query=bash" not in options.overrides:
        # Hydra's script completes by the first word of a command, which is the name of all verbs.
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


def _remove_first(argument: str, left: list[str]) -> bool:
    """Remove an argument from a list; False if it is not in the list."""
    if argument not in left:
        return False
    left.remove(argument)
    return True


def _with_home(override: str) -> str:
    """The override with `~` replaced by the home folder: not every shell does this, and Hydra rejects `~`."""
    key, equals, value = override.partition("=")
    folder = home() if equals and (value == "~" or value.startswith("~/")) else None
    return override if folder is None else f"{key}={folder}{value[1:]}"


_READ = ("searchpath", "sweeper", "launcher", "job.name", "help", "hydra_help")
_FOLDER = "a run's folder is runs/SWEEP/NAME: give runs=FOLDER, sweep=NAME or name=NAME"
_LOGS = "leave it out: a run has its logs in its own folder"
# Advice by the first part of the key.
_CURES = {
    "run": _FOLDER,
    "sweep": _FOLDER,
    "output_subdir": "leave it out: a run has its recipe in config.yaml of its folder",
    "mode": "add -m for several points, or use titanlab sweep",
    "job.chdir": _FOLDER,
    "job.env_set": "set it in the shell, or with launch=slurm in launch.environment",
    "job.env_copy": "set it in the shell, or with launch=slurm in launch.environment",
    "job_logging": _LOGS,
    "hydra_logging": _LOGS,
    "verbose": _LOGS,
    "callbacks": "leave it out: nothing calls them here",
}
_RULE = "is a setting of Hydra's that titanlab does not read"
_LOGGING = ("job_logging", "hydra_logging")
# Values that mean "not set": those of titanlab's config.yaml, and Hydra's defaults, which other primary configs have.
_UNSET: Mapping[str, tuple[Any, ...]] = {
    "run.dir": (".", "outputs/${now:%Y-%m-%d}/${now:%H-%M-%S}"),
    "sweep.dir": (".", "multirun/${now:%Y-%m-%d}/${now:%H-%M-%S}"),
    "sweep.subdir": (".", "${hydra.job.num}"),
    "output_subdir": (None, ".hydra"),
    "callbacks": ({},),
    "verbose": (False,),
    "job.chdir": (False, None),
    "job.env_set": ({},),
    "job.env_copy": ([],),
}


def check_overrides(overrides: Sequence[str]) -> None:
    """Check that overrides set only those settings of Hydra that titanlab reads.

    Raises:
        ConfigError: an override sets another setting. (Hydra itself reports unknown settings.)
    """
    known = {field.name for field in dataclasses.fields(HydraConf)}
    for override in overrides:
        key, _, value = override.partition("=")
        group, _, name = key.lstrip("+~").partition(".")
        if group.partition("@")[0] in [f"hydra/{logging}" for logging in _LOGGING]:
            raise ConfigError(group, value, _RULE, _LOGS)
        if group == "hydra" and name.partition(".")[0] in known and not _matching_key(name, _READ):
            raise ConfigError(f"hydra.{name}", value, _RULE, _cure(name))
        if key.lstrip("+~") == "hydra":
            raise ConfigError("hydra", value, _RULE, "leave it out: titanlab train --help has the keys of a recipe")


def check_files(whole: DictConfig, flags: Mapping[str, str | None]) -> None:
    """Check that config files set only those settings of Hydra that titanlab reads.

    Args:
        whole: a composition with Hydra's part.
        flags: values of the flags that say where configs are, by flag.

    Raises:
        ConfigError: a file sets another setting.
    """
    composed: Any = OmegaConf.to_container(whole.hydra, resolve=False)
    for key, unset in _UNSET.items():
        value = composed
        for name in key.split("."):
            value = value[name]
        if value not in unset:
            raise ConfigError(f"hydra.{key}", value, f"{_RULE}{_set_by(key, flags)}", _cure(key))
    has_own_primary = flags.get("--config-name") is not None or flags.get("--config-path") is not None
    for group in _LOGGING:
        option = whole.hydra.runtime.choices.get(f"hydra/{group}")
        if option != "none" and not (has_own_primary and option == "default"):
            raise ConfigError(f"hydra/{group}", option, f"{_RULE}{_set_by('defaults', flags, group)}", _LOGS)


def _matching_key(name: str, keys: Sequence[str] | Mapping[str, str]) -> str:
    """The first of the keys that equals a name or contains it; empty if there is none."""
    return next((key for key in keys if name == key or name.startswith(f"{key}.")), "")


def _cure(name: str) -> str:
    return _CURES.get(_matching_key(name, _CURES), "leave it out")


def _set_by(key: str, flags: Mapping[str, str | None], text: str = "") -> str:
    """The part of an error that names the file that sets a key of Hydra; it reads the config files again."""
    for flag in ("--config-dir", "--config-path"):
        folder = flags.get(flag)
        for path in sorted(Path(folder).rglob("*.yaml")) if folder else ():
            try:
                content = parse_yaml(path.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue
            node = content
            for name in ("defaults",) if key == "defaults" else ("hydra", *key.split(".")):
                node = node.get(name) if isinstance(node, dict) else None
            if node is not None and text in str(node):
                return f", and {path} sets it"
    return ""
