"""Refuses settings that a config, perhaps from a stranger, must not have: code, variables, and settings without effect.

Hydra calls whatever code `_target_` names (callbacks, launchers, sweepers). Its logging calls what `class`, `()` and
`ext://` name, and `pkg://` in its search path imports a module. OmegaConf's `oc.env` reads any environment variable;
`oc.create` and `oc.decode` make configs from text. A recipe needs none of these. Hydra blocks some modules itself, but
its list is incomplete, and its error names another key.

titanlab reads only these settings of Hydra: `hydra.searchpath`, `hydra.sweeper` of a sweep, `hydra.job.name` (as
`${hydra:job.name}`), `hydra.mode` of a file and the texts of the help pages. Other settings would have no effect.
`titanlab.sweep.request` checks `hydra.launcher`, because it knows the points of a sweep.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import omegaconf
import yaml
from hydra.conf import HydraConf
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, QuotedString
from hydra.errors import HydraException
from omegaconf import OmegaConf

from titanlab.errors import ConfigError
from titanlab.options import conf_packages, discover
from titanlab.records import yaml_excess

VARIABLES = (
    *("HOME", "USER", "LOGNAME", "HOSTNAME", "PWD", "TMPDIR", "SCRATCH", "WORK", "PROJECT", "XDG_CACHE_HOME"),
    *("TITANLAB_CACHE", "HF_HOME", "SLURM_JOB_ID", "SLURM_TMPDIR", "SLURM_CLUSTER_NAME"),
)
"""Environment variables that `${oc.env:NAME}` may read; none of them contains a secret."""
_TARGET = "_target_"
# The classes that Hydra's own logging configs name, which are therefore allowed.
_HANDLERS = ("StreamHandler", "FileHandler", "NullHandler", "Formatter", "Filter")
_CLASSES = tuple(f"logging.{name}" for name in _HANDLERS)
_STREAMS = ("ext://sys.stdout", "ext://sys.stderr")
_STARTERS = ("launcher", "sweeper")
_RULE = "names code, and a config never runs any"
_CURE = "leave it out; code comes as an option of a package: docs/models-of-your-own.md"
_READ = ("searchpath", "sweeper", "launcher", "job.name", "help", "hydra_help")
_FOLDER = "a run's folder is runs/SWEEP/NAME: give runs=FOLDER, sweep=NAME or name=NAME"
_LOGS = "leave it out: a run has its logs in its own folder"
# A setting of Hydra, or the first part of its key → the cure in the error about it.
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
_UNREAD = "is a setting of Hydra's that titanlab does not read"
_LOGGING = ("hydra/job_logging", "hydra/hydra_logging")
_SETTINGS = frozenset(field.name for field in dataclasses.fields(HydraConf))
# Values with which a setting of Hydra has no effect in Hydra either: they are allowed.
_UNSET: tuple[Any, ...] = (".", None, False, {}, [])


def replace_resolvers() -> None:
    """Let OmegaConf read only the environment variables in `VARIABLES`, and never make a config from text."""
    # OmegaConf 2.3 has this function under an older name.
    is_old = omegaconf.__version__.startswith("2.3.")
    register: Any = OmegaConf.register_new_resolver if is_old else OmegaConf.register_resolver
    register("oc.env", _variable, replace=True)
    for name in ("oc.create", "oc.decode"):
        register(name, partial(_refuse_making, name), replace=True)


def check_overrides(overrides: Sequence[str]) -> None:
    """Check overrides by the rules of `check_file`. Overrides that cannot be read are skipped: Hydra reports them.

    Raises:
        ConfigError: an override names code, a package to import, or a setting that titanlab does not read.
    """
    for text in overrides:
        key, _, typed = text.partition("=")
        key = key.lstrip("+~")
        if key.partition("@")[0] in [f"hydra.{name}.{_TARGET}" for name in _STARTERS]:
            raise own_start_error(key, typed)
        try:
            (override,) = OverridesParser.create().parse_overrides([text])
            value = override.value()
        except (HydraException, ValueError, TypeError, AttributeError):
            continue
        if key == "hydra.searchpath":
            check_search_path(value)
        for path, code in _code(value, key, within_hydra=key.startswith("hydra")):
            raise ConfigError(path, code, _RULE, _CURE)
        if key.partition("@")[0] in _LOGGING:
            raise ConfigError(key, typed, _UNREAD, _LOGS)
        if key == "hydra":
            raise ConfigError(key, typed, _UNREAD, "leave it out: titanlab train --help has the keys of a recipe")
        if key.startswith("hydra."):
            _check_setting(key.removeprefix("hydra."), typed)


def check_file(content: Mapping[Any, Any], within: str, option: str, file: object) -> None:
    """Check that a YAML names no code, and sets no setting of Hydra that titanlab does not read.

    Args:
        within, option: the group that the YAML is an option of, and the option's name.
    """
    for path, value in _code(content, "", within_hydra=True):
        if within in [f"hydra/{name}" for name in _STARTERS]:
            raise own_start_error(within, option)
        raise ConfigError(path, value, f"{_RULE}: {file}", _CURE)
    where = f", and {file} sets it"
    for entry, key, group in chosen_groups(content, file):
        if group in _LOGGING and entry[key] not in ("none", "default"):
            raise ConfigError(group, entry[key], f"{_UNREAD}{where}", _LOGS)
    settings = content.get("hydra")
    for key, value in settings.items() if isinstance(settings, dict) else ():
        is_nested = key in ("run", "sweep", "job") and isinstance(value, dict)
        inner = {f"{key}.{name}": each for name, each in value.items()} if is_nested else {key: value}
        for name, each in inner.items():
            if name != "mode" and each not in _UNSET:
                _check_setting(name, each, where)


def chosen_groups(content: Mapping[Any, Any], file: object) -> Iterator[tuple[dict[Any, Any], Any, str]]:
    """Each `key: option` of a YAML's defaults list: the mapping, the key, and the group that the key names."""
    for entry in content.get("defaults") or []:
        for key in list(entry) if isinstance(entry, dict) else ():
            words = str("" if key is None else key).split()
            group = words[-1].lstrip("/") if words else ""
            if group in ("", "override", "optional"):
                # Without this error Hydra would raise one of Python's own.
                shown = f"{'' if key is None else key}: {entry[key]}"
                raise ConfigError("defaults", shown, f"names no group: {file}", "write GROUP: OPTION")
            yield entry, key, group


def _check_setting(name: str, value: Any, where: str = "") -> None:
    """Check that titanlab reads a setting of Hydra; Hydra itself reports settings that do not exist."""
    of = [name] + [name[: dot.start()] for dot in re.finditer(r"\.", name)]
    if name.partition(".")[0] in _SETTINGS and not any(key in of for key in _READ):
        cure = next((text for key, text in _CURES.items() if key in of), "leave it out")
        raise ConfigError(f"hydra.{name}", value, f"{_UNREAD}{where}", cure)


def check_size(text: str, file: object) -> None:
    """Check that reading a YAML neither overflows the stack nor makes more values than fit into memory."""
    # Hydra reports files that cannot be read.
    with contextlib.suppress(yaml.YAMLError):
        if (reason := yaml_excess(text)) is not None:
            raise ConfigError("file", file, reason, "write the values themselves")


def check_search_path(entries: Any) -> None:
    """Check that Hydra's search path names only packages with options for titanlab, because Hydra imports packages."""
    if isinstance(entries, ChoiceSweep | list):
        for entry in entries.list if isinstance(entries, ChoiceSweep) else entries:
            check_search_path(entry)
        return
    text = entries.text if isinstance(entries, QuotedString) else str(entries)
    if text.startswith("pkg://") and text.removeprefix("pkg://") not in conf_packages():
        cure = "give a folder, or install a package with options: docs/models-of-your-own.md"
        raise ConfigError("hydra.searchpath", text, "would import a module, and a config never runs code", cure)


def _code(node: Any, path: str, *, within_hydra: bool) -> Iterator[tuple[str, Any]]:
    """The keys with which a config would run code, each with its value."""
    if isinstance(node, QuotedString | ChoiceSweep):
        node = node.text if isinstance(node, QuotedString) else node.list
    # A key of a mapping in an override may have quotes.
    last = path.rpartition(".")[2].strip("'\"")
    if last in (_TARGET, "()") or (within_hydra and last == "class" and node not in _CLASSES):
        yield path, node
    elif isinstance(node, Mapping | list):
        inner = node.items() if isinstance(node, Mapping) else (("", value) for value in node)
        for key, value in inner:
            yield from _code(value, f"{path}.{key}".strip("."), within_hydra=within_hydra)
    elif isinstance(node, str) and node.startswith(("ext://", "cfg://")) and node not in _STREAMS:
        yield path, node


def own_start_error(key: str, value: str | None) -> ConfigError:
    """The error for a config that replaces Hydra's launcher or sweeper."""
    rule = "would run the points by itself, and here all are planned and submitted together"
    launchers = " or ".join(f"launch={kind}" for kind in discover()["launch"])
    return ConfigError(key, value, rule, f"leave it out, and choose with {launchers}")


def _variable(name: str, default: Any = None) -> Any:
    if name not in VARIABLES:
        rule = "a variable of the environment may be a secret, and recipes are written down and sent to trackers"
        raise ConfigError("oc.env", name, rule, "give the value itself; docs/configuration.md lists what may be read")
    return os.environ.get(name, default)


def _refuse_making(name: str, *_: Any) -> Any:
    raise ConfigError(name, "…", "creates configs from text, which cannot be checked", "write the value itself")
