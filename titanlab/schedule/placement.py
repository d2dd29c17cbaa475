"""The placement of stages on a pipeline's ranks: base classes of schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from titanlab.errors import ConfigError
from titanlab.schedule.contract import PipelineSchedule

KEY = "schedule.stages_per_rank"
_COMPARED_STAGES = (2, 4, 8)


class OneStage(PipelineSchedule):
    """A schedule with one stage per rank."""

    def stage_count(self, *, ranks: int) -> int:
        """One stage for each rank."""
        return ranks

    def placement(self, *, ranks: int) -> list[int]:
        """Rank of each stage: 0 1 2."""
        return looped(ranks=ranks)


@dataclass(kw_only=True)
class Looped(PipelineSchedule):
    """A schedule with several stages per rank, placed round-robin.

    Attributes:
        stages_per_rank: stages of each rank, none adjacent to another; more stages mean a smaller bubble and more
            communication.
    """

    stages_per_rank: int = field(default=2, metadata={"most": 1000})

    def __post_init__(self) -> None:
        if self.stages_per_rank < 1:
            raise ConfigError(KEY, self.stages_per_rank, "every rank has at least one stage", "try 2")

    def alternatives(self) -> list[PipelineSchedule]:
        """Few and many stages per rank."""
        return [replace(self, stages_per_rank=stages) for stages in _COMPARED_STAGES]

    def stage_count(self, *, ranks: int) -> int:
        """`stages_per_rank` stages for each rank."""
        return ranks * self.stages_per_rank

    def placement(self, *, ranks: int) -> list[int]:
        """Rank of each stage: 0 1 2 0 1 2."""
        return looped(ranks=ranks, stages_per_rank=self.stages_per_rank)


@dataclass(kw_only=True)
class VShaped(PipelineSchedule):
    """A schedule with two stages per rank, placed on the ranks in order and then in reverse.

    Attributes:
        stages_per_rank: always 2.
    """

    stages_per_rank: int = 2

    def __post_init__(self) -> None:
        if self.stages_per_rank != 2:
            rule = "stages go through the ranks there and back, two a rank"
            raise ConfigError(KEY, self.stages_per_rank, rule, "try 2, or schedule=interleaved_zero_bubble")

    def stage_count(self, *, ranks: int) -> int:
        """Two stages for each rank."""
        return 2 * ranks

    def placement(self, *, ranks: int) -> list[int]:
        """Rank of each stage: 0 1 2 2 1 0."""
        return v_shaped(ranks=ranks)


def looped(*, ranks: int, stages_per_rank: int = 1) -> list[int]:
    """Rank of each stage, round-robin: 0 1 2 0 1 2."""
    return [stage % ranks for stage in range(ranks * stages_per_rank)]


def v_shaped(*, ranks: int) -> list[int]:
    """Rank of each stage, forward and back: 0 1 2 2 1 0. The first and the last stage are on the same rank."""
    return [*range(ranks), *reversed(range(ranks))]


def stages_of(placement: Sequence[int], rank: int) -> list[int]:
    """The stages of a rank, in the order of the forward pass."""
    return [stage for stage, owner in enumerate(placement) if owner == rank]
