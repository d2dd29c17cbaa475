"""Config of tracker=tensorboard."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from titanlab.errors import ConfigError
from titanlab.options import option
from titanlab.techniques.tracker.contract import Tracker, TrackerConfig


@option("tracker", "tensorboard")
@dataclass(frozen=True, kw_only=True)
class TensorBoard(TrackerConfig):
    """Event files in the run's folder, for `tensorboard --logdir runs`.

    Attributes:
        flush_seconds: seconds between writes of rows to disk.
    """

    kind: str = "tensorboard"
    flush_seconds: int = 10

    def __post_init__(self) -> None:
        if self.flush_seconds < 1:
            raise ConfigError("tracker.flush_seconds", self.flush_seconds, "must be at least 1", "try 10")

    def implementation(self) -> Tracker:
        from titanlab.techniques.tracker.tensorboard import TensorBoardTracker

        return TensorBoardTracker(self)

    def check_installed(self) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            cure = "pip install tensorboard, or try tracker=jsonl"
            raise ConfigError("tracker", "tensorboard", "the package is not installed", cure)

    def for_rebuild(self, rows: int) -> TensorBoard:
        return self
