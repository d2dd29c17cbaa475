"""What a schedule of a pipeline has to offer."""

from __future__ import annotations

from typing import Protocol

from titanlab.costs.setting import Setting
from titanlab.schedule.action import Action


class PipelineSchedule(Protocol):
    """The config of a schedule, whose methods say which rank has which stage and what each rank does when.

    A schedule needs no torch: its config is its implementation. The base classes in `titanlab.schedule.placement` have
    everything but `actions`.
    """

    kind: str

    def check(self, setting: Setting) -> None:
        """Check the rest of the recipe against what this schedule needs.

        Raises:
            ConfigError: it does not fit.
        """
        return  # the default; mypy takes an empty body for an abstract method

    def stage_count(self, *, ranks: int) -> int:
        """Number of stages that a pipeline of so many ranks is cut into; cheap for any number of ranks."""
        ...

    def placement(self, *, ranks: int) -> list[int]:
        """Rank of each stage.

        Raises:
            ConfigError: the schedule is not for so many ranks.
        """
        ...

    def check_pipeline(self, *, ranks: int, microbatches: int) -> None:
        """Check that the schedule works for these numbers; by default it does for all.

        Raises:
            ConfigError: it does not.
        """
        return  # the default; mypy takes an empty body for an abstract method

    def actions(self, *, ranks: int, microbatches: int) -> list[list[Action]]:
        """Actions by rank, in the order in which each rank runs them.

        Raises:
            ConfigError: as `check_pipeline` does.
        """
        ...
