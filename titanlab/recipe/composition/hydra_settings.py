"""Rejects settings of Hydra that titanlab does not read: they would have no effect.

titanlab reads `hydra.searchpath`, `hydra.sweeper` of a sweep, `hydra.job.name` (as `${hydra:job.name}`) and the texts
of the help pages. `titanlab.sweep.request` checks `hydra.launcher`, because it knows the points.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.conf import HydraConf
from omegaconf import DictConfig, OmegaConf

from titanlab.errors import ConfigError

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
                content: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
            except (OSError, ValueError, yaml.YAMLError):
                continue
            node = content
            for name in ("defaults",) if key == "defaults" else ("hydra", *key.split(".")):
                node = node.get(name) if isinstance(node, dict) else None
            if node is not None and text in str(node):
                return f", and {path} sets it"
    return ""
