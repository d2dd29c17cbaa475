"""Configs of the group `checkpoint`: whether the training waits while a checkpoint is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields

from titanlab.checkpoint.contract import CheckpointConfig, Saver, Target
from titanlab.costs import Setting
from titanlab.errors import ConfigError
from titanlab.options import option

# The way of saving is not part of a run's identity, because it does not change the run's numbers.
_NO_IDENTITY = {"identity": False}


@option("checkpoint", "off")
@dataclass(frozen=True, kw_only=True)
class NoCheckpoints(CheckpointConfig):
    """Saves nothing. `load_from` still says where the run starts."""

    kind: str = field(default="off", metadata=_NO_IDENTITY)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("every", "minutes", "keep_every"):
            if value := getattr(self, name):
                raise ConfigError(
                    f"checkpoint.{name}", value, "checkpoint=off saves nothing", "try checkpoint=sync, or leave it out"
                )

    def implementation(self, target: Target) -> Saver:
        return Saver()


@option("checkpoint", "sync")
@dataclass(frozen=True, kw_only=True)
class Sync(CheckpointConfig):
    """The training waits until a checkpoint is on the disk. It needs no memory beside the model's."""

    kind: str = field(default="sync", metadata=_NO_IDENTITY)

    def implementation(self, target: Target) -> Saver:
        from titanlab.checkpoint.saving import SyncSaver

        return SyncSaver(target)


@option("checkpoint", "async")
@dataclass(frozen=True, kw_only=True)
class Async(CheckpointConfig):
    """The training waits for a copy in host memory, and goes on while a thread writes it.

    The copy has the size of the rank's part of the checkpoint. Its memory is kept for the next save.
    """

    kind: str = field(default="async", metadata=_NO_IDENTITY)

    def implementation(self, target: Target) -> Saver:
        from titanlab.checkpoint.saving import AsyncSaver

        return AsyncSaver(target)


@option("checkpoint", "async_pinned")
@dataclass(frozen=True, kw_only=True)
class AsyncPinned(CheckpointConfig):
    """As async, for GPUs: a separate stream copies to pinned memory while the next step computes."""

    kind: str = field(default="async_pinned", metadata=_NO_IDENTITY)

    def check(self, setting: Setting) -> None:
        if setting.accelerator == "cpu":
            raise ConfigError("checkpoint", "async_pinned", "pinned memory is for GPUs", "try checkpoint=async")

    def reduced(self, *, note: Callable[[str], None]) -> CheckpointConfig:
        note("checkpoint=async_pinned copies from GPUs: async")
        return Async(**{each.name: getattr(self, each.name) for each in fields(self) if each.name != "kind"})

    def implementation(self, target: Target) -> Saver:
        from titanlab.checkpoint.saving import PinnedSaver

        return PinnedSaver(target)
