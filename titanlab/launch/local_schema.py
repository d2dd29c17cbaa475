"""Config of launch=local."""

from __future__ import annotations

from dataclasses import dataclass, field

from titanlab.errors import ConfigError
from titanlab.launch.contract import LaunchConfig, Launcher, check_restarts
from titanlab.options import option


@option("launch", "local")
@dataclass(frozen=True, kw_only=True)
class Local(LaunchConfig):
    """Processes on this host.

    Attributes:
        threads: threads of one process; null: OMP_NUM_THREADS of the environment, but not more than an equal share of
            the host's cores, and that share without it.
        at_once: processes of all runs of a sweep together that run at once; null: as many as the host has cores. A
            larger run runs alone.
        restarts: how often the ranks start again in place, from the newest checkpoint, after one of them has died.
        min_world: after a rank has failed twice in a row, the others go on without it, as at least so many processes;
            null: they do not.
    """

    kind: str = "local"
    threads: int | None = field(default=None, metadata={"most": 10_000})
    at_once: int | None = None
    restarts: int = 0
    min_world: int | None = None

    def __post_init__(self) -> None:
        check_restarts(self)
        for name in ("threads", "at_once"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"launch.{name}", value, "must be at least 1", "try 1, or null")

    @property
    def runs_here(self) -> bool:
        return True

    @property
    def starts_directly(self) -> bool:
        return True

    def implementation(self) -> Launcher:
        from titanlab.launch.local import LocalLauncher

        return LocalLauncher()
