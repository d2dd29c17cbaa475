"""What the schemas of schedules with several stages a rank have in common."""

from __future__ import annotations

from dataclasses import dataclass, field

from titanlab.errors import ConfigError

KEY = "schedule.stages_per_rank"


@dataclass(kw_only=True)
class Looped:
    """Stages go round and round the ranks, as often as asked for."""

    stages_per_rank: int = field(default=2, metadata={"most": 1000})

    def __post_init__(self) -> None:
        if self.stages_per_rank < 1:
            raise ConfigError(KEY, self.stages_per_rank, "every rank has at least one stage", "try 2")


@dataclass(kw_only=True)
class VShaped:
    """Stages go there and back: every rank has two."""

    stages_per_rank: int = 2

    def __post_init__(self) -> None:
        if self.stages_per_rank != 2:
            rule = "stages go through the ranks there and back, two a rank"
            raise ConfigError(KEY, self.stages_per_rank, rule, "try 2, or schedule=interleaved_zero_bubble")
