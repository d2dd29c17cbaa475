"""Config of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field

from titanlab.errors import ConfigError
from titanlab.options import option


@option("checkpoint")
@dataclass(kw_only=True)
class Checkpoint:
    """When a run saves checkpoints, and the checkpoint from which a new run starts.

    Attributes:
        every: steps between checkpoints; 0: only at the end.
        keep: number of the newest checkpoints to keep; 0: all.
        at_end: whether to save at the end of a run, also after a stop.
        load_from: a run or a checkpoint; a new run takes model, optimizer and position in the data from it. null: start
            from initial values.
    """

    every: int = field(default=0, metadata={"identity": False})
    keep: int = field(default=2, metadata={"identity": False})
    at_end: bool = field(default=True, metadata={"identity": False})
    load_from: str | None = None

    def __post_init__(self) -> None:
        for name in ("every", "keep"):
            value = getattr(self, name)
            if value < 0:
                raise ConfigError(f"checkpoint.{name}", value, "must not be negative", "try 0")
