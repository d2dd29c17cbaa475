"""Config of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field

from titanlab.errors import ConfigError
from titanlab.options import option


@option("checkpoint")
@dataclass(kw_only=True)
class Checkpoint:
    """When a run saves itself, and what it starts from.

    Attributes:
        every: steps between checkpoints; 0: only at the end.
        keep: checkpoints kept, newest first; 0: all.
        at_end: whether the end of a run, a stop included, is saved.
        load_from: a run or one of its checkpoints whose model, optimizer and position in the data a
            new run starts with; null: start from initial values.
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
