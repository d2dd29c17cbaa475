"""The contract of a pipeline schedule, and its base classes by the placement of stages on ranks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol

from titanlab.costs import OptionConfig
from titanlab.errors import ConfigError
from titanlab.techniques.schedule.action import DURATIONS, Action, Kind, Timeline, peak_in_flight, simulate


class PipelineSchedule(OptionConfig, Protocol):
    """The config of a schedule; its methods give the placement of stages and the actions of each rank.

    A schedule needs no torch, so its config is its implementation. The base classes below implement everything but
    `actions`.
    """

    # Whether gradients of weights are computed after those of inputs: True: always; False: never; None: see `actions`.
    splits: ClassVar[bool | None] = None

    def alternatives(self) -> Sequence[PipelineSchedule]:
        """The configs of this kind that the planner compares; by default this one alone."""
        return [self]

    def fixed_size(self) -> tuple[int, int] | None:
        """The only numbers of ranks and microbatches that the schedule supports; by default None: it supports several.

        Raises:
            ConfigError: the file with these numbers cannot be read.
        """
        return None

    def splits_backward(self, *, ranks: int, microbatches: int) -> bool:
        """Whether gradients of weights are computed later than those of inputs (I and W)."""
        if self.splits is not None:
            return self.splits
        actions = self.actions(ranks=ranks, microbatches=microbatches)
        return any(action.kind is Kind.WEIGHT for order in actions for action in order)

    def peak_in_flight(self, *, ranks: int, microbatches: int) -> float:
        """Largest number of microbatches whose activations a rank keeps, as `Timeline` counts them.

        By default this is counted in the actions; a schedule with a formula overrides this method, which is faster.
        """
        return max(map(peak_in_flight, self.actions(ranks=ranks, microbatches=microbatches)))

    @abstractmethod
    def stage_count(self, *, ranks: int) -> int:
        """Number of stages of a pipeline; cheap for any number of ranks."""

    @abstractmethod
    def placement(self, *, ranks: int) -> list[int]:
        """Rank of each stage. ConfigError: the schedule does not support this number of ranks."""

    def check_pipeline(self, *, ranks: int, microbatches: int) -> None:
        """Check that the schedule supports these numbers; by default it supports all.

        Raises:
            ConfigError: it does not support them.
        """
        return  # the default; mypy takes an empty body for an abstract method

    @abstractmethod
    def actions(self, *, ranks: int, microbatches: int) -> list[list[Action]]:
        """Actions by rank, in the order in which each rank runs them. ConfigError: see `check_pipeline`."""


def timeline_of(
    schedule: PipelineSchedule,
    *,
    ranks: int,
    microbatches: int,
    durations: Mapping[Kind, float] = DURATIONS,
    transfer: float = 0.0,
) -> Timeline:
    """The simulated timeline of a schedule.

    Args:
        durations: time of one microbatch through all layers of a rank; each stage of the rank takes an equal part.
        transfer: time to send a tensor from one rank to another, in the same unit.
    """
    placement = schedule.placement(ranks=ranks)
    of_a_stage = {kind: duration * ranks / len(placement) for kind, duration in durations.items()}
    orders = schedule.actions(ranks=ranks, microbatches=microbatches)
    return simulate(orders, placement, of_a_stage, transfer=transfer)


_COMPARED_STAGES = (2, 4, 8)


class OneStage(PipelineSchedule):
    """A schedule with one stage per rank."""

    def stage_count(self, *, ranks: int) -> int:
        return ranks

    def placement(self, *, ranks: int) -> list[int]:
        """Rank of each stage: 0 1 2."""
        return list(range(ranks))


@dataclass(frozen=True, kw_only=True)
class Looped(PipelineSchedule):
    """A schedule with several stages per rank, placed round-robin.

    Attributes:
        stages_per_rank: stages of each rank, none adjacent to another; more stages mean a smaller bubble and more
            communication.
    """

    stages_per_rank: int = field(default=2, metadata={"least": 1, "most": 1000})

    def alternatives(self) -> list[PipelineSchedule]:
        return [replace(self, stages_per_rank=stages) for stages in _COMPARED_STAGES]

    def stage_count(self, *, ranks: int) -> int:
        return ranks * self.stages_per_rank

    def placement(self, *, ranks: int) -> list[int]:
        """Rank of each stage: 0 1 2 0 1 2."""
        return [*range(ranks)] * self.stages_per_rank


@dataclass(frozen=True, kw_only=True)
class VShaped(PipelineSchedule):
    """A schedule with two stages per rank, placed on the ranks in order and then in reverse."""

    stages_per_rank: int = 2

    def __post_init__(self) -> None:
        if self.stages_per_rank != 2:
            rule = "stages go down the ranks and back up, so each rank has two"
            raise ConfigError(
                "schedule.stages_per_rank", self.stages_per_rank, rule, "try 2, or schedule=interleaved_zero_bubble"
            )

    def stage_count(self, *, ranks: int) -> int:
        return 2 * ranks

    def placement(self, *, ranks: int) -> list[int]:
        """Rank of each stage: 0 1 2 2 1 0. The first and the last stage are on the same rank."""
        return [*range(ranks), *reversed(range(ranks))]


def stages_of(placement: Sequence[int], rank: int) -> list[int]:
    """The stages of a rank, in the order of the forward pass."""
    return [stage for stage, owner in enumerate(placement) if owner == rank]
