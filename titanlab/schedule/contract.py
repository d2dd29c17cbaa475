"""The contract of a pipeline schedule."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol

from titanlab.costs.setting import Setting
from titanlab.schedule.action import Action, Kind
from titanlab.schedule.timeline import peak_in_flight


class PipelineSchedule(Protocol):
    """The config of a schedule; its methods give the placement of stages and the actions of each rank.

    A schedule needs no torch, so its config is its implementation. The base classes in `titanlab.schedule.placement`
    implement everything but `actions`.
    """

    kind: str

    def check(self, setting: Setting) -> None:
        """Check that the rest of the recipe fits this schedule.

        Raises:
            ConfigError: it does not fit.
        """
        return  # the default; mypy takes an empty body for an abstract method

    def alternatives(self) -> Sequence[PipelineSchedule]:
        """The configs of this kind that the planner compares; by default this one alone."""
        return [self]

    def fixed_size(self) -> tuple[int, int] | None:
        """The only numbers of ranks and microbatches that the actions are for; by default None: there are others.

        Raises:
            ConfigError: a file that says so cannot be read.
        """
        return None

    def splits_backward(self, *, ranks: int, microbatches: int) -> bool:
        """Whether gradients of weights are computed later than those of inputs (I and W).

        By default seen in the actions; a schedule that always or never does answers sooner.
        """
        actions = self.actions(ranks=ranks, microbatches=microbatches)
        return any(action.kind is Kind.WEIGHT for order in actions for action in order)

    def peak_in_flight(self, *, ranks: int, microbatches: int) -> float:
        """Largest number of microbatches whose activations a rank keeps, as `Timeline` counts them.

        By default counted in the actions; a schedule that knows a formula answers sooner.
        """
        return max(map(peak_in_flight, self.actions(ranks=ranks, microbatches=microbatches)))

    @abstractmethod
    def stage_count(self, *, ranks: int) -> int:
        """Number of stages of a pipeline; cheap for any number of ranks."""

    @abstractmethod
    def placement(self, *, ranks: int) -> list[int]:
        """Rank of each stage.

        Raises:
            ConfigError: the schedule does not support this number of ranks.
        """

    def check_pipeline(self, *, ranks: int, microbatches: int) -> None:
        """Check that the schedule supports these numbers; by default it supports all.

        Raises:
            ConfigError: it does not support them.
        """
        return  # the default; mypy takes an empty body for an abstract method

    @abstractmethod
    def actions(self, *, ranks: int, microbatches: int) -> list[list[Action]]:
        """Actions by rank, in the order in which each rank runs them.

        Raises:
            ConfigError: as `check_pipeline` does.
        """
