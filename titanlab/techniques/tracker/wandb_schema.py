"""Config of tracker=wandb."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass, replace

from titanlab.errors import ConfigError
from titanlab.options import option
from titanlab.techniques.tracker.contract import Tracker, TrackerConfig

MODES = ("auto", "online", "offline", "off")
_NAME = re.compile(r"[^/\\#?%:]{1,128}")


@option("tracker", "wandb")
@dataclass(frozen=True, kw_only=True)
class Wandb(TrackerConfig):
    """Weights & Biases, in a separate process.

    Attributes:
        mode: `online`, `offline` (files for `wandb sync`), `off`, or `auto`: the value of WANDB_MODE, or online if it
            is not set. Without an API key, online becomes offline.
        project: null: WANDB_PROJECT, or titanlab.
        entity: user or team; null: the account's default.
        group: null: the sweep's name, so that a dashboard compares its recipes.
        tags: added to those of model, hardware and precision.
        finish_seconds: how long the end of a run may wait for uploads; rows that are not uploaded stay on disk.
        queue_rows: rows that can wait while wandb starts or the network is slow; further rows are left out.
    """

    kind: str = "wandb"
    mode: str = "auto"
    project: str | None = None
    entity: str | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()
    finish_seconds: float = 10.0
    queue_rows: int = 10_000

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError("tracker.mode", self.mode, "is no mode of wandb", f"try {', '.join(MODES)}")
        for name in ("project", "entity", "group"):
            value = getattr(self, name)
            if value is not None and not _NAME.fullmatch(value):
                raise ConfigError(
                    f"tracker.{name}",
                    value,
                    r"must be 1 to 128 characters without / \ # ? % :",
                    f"try tracker.{name}=titanlab",
                )
        for tag in self.tags:
            if not 1 <= len(tag) <= 64:
                raise ConfigError("tracker.tags", tag, "a tag has 1 to 64 characters", "shorten it")
        if not self.finish_seconds >= 0:
            raise ConfigError("tracker.finish_seconds", self.finish_seconds, "must not be negative", "try 10")
        if self.queue_rows < 1:
            raise ConfigError("tracker.queue_rows", self.queue_rows, "must be at least 1", "try 10000")

    def implementation(self) -> Tracker:
        from titanlab.techniques.tracker.wandb import WandbTracker

        return WandbTracker(self)

    def check_installed(self) -> None:
        if self.mode != "off" and importlib.util.find_spec("wandb") is None:
            cure = "pip install wandb, or try tracker=jsonl"
            raise ConfigError("tracker", "wandb", "the package is not installed", cure)

    def for_rebuild(self, rows: int) -> Wandb:
        # wandb takes about 5,000 rows a second, so this time limit is generous.
        return replace(self, mode="offline", queue_rows=rows + 1, finish_seconds=120 + rows / 100)
