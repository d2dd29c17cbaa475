"""The launchers that are installed, by kind."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from titanlab.distributed import ranks
from titanlab.distributed.ranks import Ranks
from titanlab.launch.contract import LaunchConfig, Launcher
from titanlab.launch.local_schema import Local
from titanlab.options import discover, schema_of


@functools.cache
def launcher_named(kind: str) -> Launcher:
    """The launcher of a kind, under the defaults of its config.

    Raises:
        ConfigError: no installed package has it.
    """
    return default_config(kind).implementation()


def default_config(kind: str) -> LaunchConfig:
    """The config of a launcher with its defaults."""
    config: LaunchConfig = schema_of("launch", kind)()
    return config


def directly(config: LaunchConfig) -> LaunchConfig:
    """The config by which a run is started here and now, whatever it was submitted with."""
    return config if config.starts_directly else Local(threads=config.threads)


def joined(environ: Mapping[str, str]) -> Ranks | None:
    """The rank that torchrun or a scheduler has started this process as; None for a process on its own.

    Raises:
        ConfigError: a variable that belongs to the set is missing or is no number.
    """
    started = ranks.joined(environ)
    for kind in discover().get("launch", {}) if started is None else ():
        started = started or launcher_named(str(kind)).ranks_in(environ)
    return started
