"""The launchers that are installed, by kind."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from titanlab.distributed import CORES, Ranks, ranks
from titanlab.errors import ConfigError
from titanlab.launch.contract import LaunchConfig, Launcher
from titanlab.launch.launchers_schema import Local
from titanlab.options import discover, schema_of


@functools.cache
def launcher_named(kind: str) -> Launcher:
    """The launcher of a kind, with the defaults of its config; a ConfigError if no installed package has it."""
    return default_config(kind).implementation()


def default_config(kind: str) -> LaunchConfig:
    """The config of a launcher with its defaults; ConfigError: a field has no default, or the kind is not installed."""
    try:
        config: LaunchConfig = schema_of("launch", kind)()
    except TypeError as error:
        raise ConfigError(
            "launch", kind, f"cannot be made without settings ({error})", "its fields need defaults"
        ) from error
    return config


def directly(config: LaunchConfig) -> LaunchConfig:
    """The config with which `titanlab train` starts a run on this host, whatever launcher submitted the run before."""
    return config if config.starts_directly else on_this_host(threads=config.threads)


def on_this_host(*, threads: int | None) -> LaunchConfig:
    """The config of the launcher that starts the ranks of one run on this host."""
    return Local(threads=threads)


def joined(environ: Mapping[str, str]) -> Ranks | None:
    """The rank as which torchrun or a scheduler has started this process; None for a single process.

    Raises:
        ConfigError: one of the launcher's variables is missing or is not a number.
    """
    own_ranks = ranks.joined(environ)
    for kind in discover().get("launch", {}) if own_ranks is None else ():
        own_ranks = own_ranks or launcher_named(str(kind)).ranks_in(environ)
    return own_ranks


def given_cores(kind: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The variable by which a rank knows how many cores its launcher gave it; empty: ranks share the host's cores."""
    cores = launcher_named(kind).cores(environ) if kind in discover().get("launch", {}) else None
    return {} if cores is None else {CORES: str(cores)}
