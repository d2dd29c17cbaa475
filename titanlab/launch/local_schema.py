"""Config of launch=local."""

from __future__ import annotations

from dataclasses import dataclass

from titanlab.errors import ConfigError
from titanlab.options import option


@option("launch", "local")
@dataclass(kw_only=True)
class Local:
    """Processes on this host.

    Attributes:
        threads: threads of one process (OMP_NUM_THREADS); null: the host's cores shared evenly.
    """

    kind: str = "local"
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise ConfigError("launch.threads", self.threads, "must be at least 1", "try 1, or null")
