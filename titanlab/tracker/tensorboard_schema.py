"""Config of tracker=tensorboard."""

from __future__ import annotations

from dataclasses import dataclass

from titanlab.errors import ConfigError
from titanlab.options import option


@option("tracker", "tensorboard")
@dataclass(kw_only=True)
class TensorBoard:
    """Event files in the run's folder, for `tensorboard --logdir runs`.

    Attributes:
        flush_seconds: how often rows reach the disk.
    """

    kind: str = "tensorboard"
    flush_seconds: int = 10

    def __post_init__(self) -> None:
        if self.flush_seconds < 1:
            raise ConfigError("tracker.flush_seconds", self.flush_seconds, "must be at least 1", "try 10")
