"""The contract of the group `checkpoint`: a torch-free config, and the saver that the config names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from titanlab.checkpoint.address_schema import Place, check_address, check_installed, is_address
from titanlab.costs import Setting
from titanlab.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from titanlab.checkpoint.contents import Position
    from titanlab.distributed import World

_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a saver saves, and where.

    Attributes:
        folder: the run's folder of checkpoints.
        keep: number of the newest checkpoints to keep; 0: all.
        keep_every: checkpoints of steps that are multiples of this are never removed; 0: none.
        recipe: SHA-256 of the run's identity; None: the run has none.
        warn: called on rank 0 with a line about an old checkpoint that cannot be removed.
        saved: called on rank 0 with the step of each checkpoint when it is complete, maybe in another thread.
    """

    folder: Place
    model: nn.Module
    optimizer: Optimizer
    world: World
    keep: int
    keep_every: int = 0
    recipe: str | None = None
    warn: Callable[[str], None] = lambda text: None
    saved: Callable[[int], None] = lambda step: None


@dataclass(frozen=True, kw_only=True)
class OnlyModel:
    """A checkpoint without the optimizer, from which no run can resume.

    Attributes:
        dtype: dtype to save the parameters in, by torch's name; None: keep theirs.
    """

    dtype: str | None = None


class Saver:
    """Saves the checkpoints of one rank, one at a time; this base class saves nothing.

    All ranks call the methods together. If a method raises OSError, for example because the disk is full, it does so on
    all ranks, and removes the partial checkpoint; training can go on.

    Attributes:
        saved_step: step of the newest complete checkpoint that this saver knows; 0: none.
    """

    saved_step = 0

    def save(self, position: Position) -> None:
        """Save; when this returns, training may go on. The caller must have called `wait` since the last save."""

    def wait(self) -> None:
        """Wait for the save in progress, if any; raises its OSError."""

    @property
    def is_done(self) -> bool:
        """Whether a save has completed or failed since the last `wait`, so that `wait` would return at once."""
        return False

    def save_last(self, position: Position, only_model: OnlyModel | None = None) -> None:
        """Save, and return when the checkpoint is durable. The caller must have called `wait` since the last save.

        Args:
            only_model: how to save only the model; None: save everything.
        """

    def before_update(self) -> None:
        """Called before the optimizer changes the model, so that a save's copies of the model are complete first."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(ABC):
    """How a run saves. A dataclass that inherits from it defines `kind` and `implementation`.

    Attributes:
        every: steps between checkpoints; 0: no such interval.
        minutes: minutes between checkpoints, by the clock of rank 0; 0: no such interval.
        keep: number of the newest checkpoints to keep; 0: all.
        keep_every: checkpoints of steps that are multiples of this number are never removed; 0: none is kept for good.
        at_end: whether to save at the end of a run, also after a stop.
        last: what a run saves after its last step: `full`, or `model` without the optimizer. After a stop the run
            always saves `full`.
        last_dtype: dtype of the parameters for last=model, by torch's name; null: as they are.
        load_from: a run or a checkpoint; a new run takes model, optimizer and position in the data from it. null: start
            from initial values.
        folder: the address of a folder in a remote store, such as `s3://bucket/folder`, below which each run has its
            checkpoints; null: they are in the run's folder.
    """

    every: int = field(default=0, metadata={"identity": False})
    minutes: float = field(default=0.0, metadata={"identity": False})
    keep: int = field(default=2, metadata={"identity": False})
    keep_every: int = field(default=0, metadata={"identity": False})
    at_end: bool = field(default=True, metadata={"identity": False})
    last: str = field(default="full", metadata={"identity": False})
    last_dtype: str | None = field(default=None, metadata={"identity": False})
    load_from: str | None = None
    folder: str | None = field(default=None, metadata={"identity": False})
    kind: str = field(default="", metadata={"identity": False})

    def check(self, setting: Setting) -> None:
        """Check that the rest of the recipe fits, or raise ConfigError."""
        return

    def check_installed(self) -> None:
        """Check that the packages for saving are installed, or raise ConfigError."""
        if self.folder is not None:
            check_installed("checkpoint.folder", self.folder)

    def reduced(self, *, note: Callable[[str], None]) -> CheckpointConfig:
        """A config that saves in the same way on a CPU, for proofs and rehearsals; by default this config itself.

        Args:
            note: called with one line for each difference from this config.
        """
        return self

    @abstractmethod
    def implementation(self, target: Target) -> Saver:
        """Make the saver of this rank for an attempt; all ranks call this together."""

    def __post_init__(self) -> None:
        if self.folder is not None:
            check_address("checkpoint.folder", self.folder)
        if self.load_from is not None and is_address(self.load_from):
            check_address("checkpoint.load_from", self.load_from)
        for name in ("every", "minutes", "keep", "keep_every"):
            value = getattr(self, name)
            if value < 0:
                raise ConfigError(f"checkpoint.{name}", value, "must not be negative", "try 0")
        if self.last not in ("full", "model"):
            raise ConfigError("checkpoint.last", self.last, "is not known", "try full or model")
        if self.last_dtype is not None and self.last_dtype not in _DTYPES:
            known = ", ".join(_DTYPES)
            raise ConfigError("checkpoint.last_dtype", self.last_dtype, "is not known", f"try one of {known}, or null")
        if self.last_dtype is not None and self.last == "full":
            rule = "a full checkpoint has the dtypes of the training"
            raise ConfigError("checkpoint.last_dtype", self.last_dtype, rule, "try checkpoint.last=model, or null")
        if self.keep_every and self.every and self.keep_every % self.every:
            rule = f"no multiple of checkpoint.every={self.every}, so few of these steps would be saved"
            nearest = max(1, round(self.keep_every / self.every)) * self.every
            raise ConfigError("checkpoint.keep_every", self.keep_every, rule, f"try {nearest}")
