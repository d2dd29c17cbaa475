"""Finds options that Hydra never reads, because an earlier folder of the search path has an option of the same name."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import PurePath

import yaml
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigSource
from omegaconf.errors import OmegaConfBaseException

from titanlab.errors import ConfigError


def check_hidden(sources: Sequence[ConfigSource], paths: Iterable[str]) -> None:
    """Check that each option of a composition is the same in all folders that have it.

    The person who wrote the later one would otherwise train with another model or layout than they believe.

    Args:
        sources: in the order in which Hydra searches them.
        paths: of configs; those without a group, and those of Hydra itself, are not checked.

    Raises:
        ConfigError: a later folder has a different option of this name.
    """
    folders = [source for source in sources if source.scheme() in ("file", "pkg") and source.provider != "hydra"]
    for path in dict.fromkeys(paths):
        group, _, option = path.partition("/")
        if not option or group == "hydra" or len(folders) < 2:
            continue
        having = [source for source in folders if source.is_config(path)]
        for read, source in itertools.product(having[:1], having[1:]):
            if _content(source, path) != _content(read, path):
                file = f"{_place(source)}/{path}.yaml"
                rule = f"{file} is never read: {_place(read)} has an option of that name"
                raise ConfigError(group, option, rule, f"rename the file, and choose {group}={_new_name(option)}")


def _content(source: ConfigSource, path: str) -> object:
    """What an option says; None if its file cannot be read."""
    try:
        result = source.load_config(path)
    except (ConfigError, HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, ValueError):
        return None
    return result.config, result.header


def _place(source: ConfigSource) -> str:
    return source.path if source.scheme() == "file" else f"the package {source.path}"


def _new_name(option: str) -> str:
    path = PurePath(option)
    return str(path.with_name(f"my_{path.name}"))
