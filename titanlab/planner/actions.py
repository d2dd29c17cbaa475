"""The actions of schedules, made once for all recipes that share them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from titanlab.costs.config_key import Key, key_of
from titanlab.schedule.action import Action


# Long lists: few of them are kept.
@functools.lru_cache(maxsize=64)
def actions_of(schedule: Key, ranks: int, microbatches: int) -> Sequence[Sequence[Action]]:
    """Actions by rank."""
    actions: Sequence[Sequence[Action]] = schedule.value.actions(ranks=ranks, microbatches=microbatches)
    return actions


class Remembered:
    """The config of a schedule that makes its actions once."""

    def __init__(self, schedule: Any) -> None:
        self._schedule = schedule

    def actions(self, *, ranks: int, microbatches: int) -> Sequence[Sequence[Action]]:
        """See `PipelineSchedule`."""
        return actions_of(key_of(self._schedule), ranks, microbatches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._schedule, name)
