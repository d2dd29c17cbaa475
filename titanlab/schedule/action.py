"""Actions of a pipeline's ranks: the forward or backward pass of one stage over one microbatch."""

from __future__ import annotations

from collections import defaultdict
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """Kind of a computation, with the letters of torch's schedules."""

    FORWARD = "F"
    BACKWARD = "B"  # both halves at once
    INPUT = "I"  # only the gradient of the stage's input, for which the previous stage waits
    WEIGHT = "W"  # the gradient of the stage's weights, for which no stage waits


class Action(NamedTuple):
    """One computation; `str` gives torch's notation: "2F0"."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class ActionList(list[Action]):
    """Actions of one rank; for each kind, a stage takes its microbatches in order."""

    def __init__(self) -> None:
        super().__init__()
        self._done: defaultdict[int, dict[Kind, int]] = defaultdict(lambda: dict.fromkeys(Kind, 0))

    def add(self, stage: int, *kinds: Kind) -> None:
        """Append an action of the stage for each kind, with the next microbatch of that kind."""
        done = self._done[stage]
        for kind in kinds:
            # A full backward counts as both halves.
            first = Kind.INPUT if kind is Kind.BACKWARD else kind
            number = done[first]
            # As `Action(stage, kind, number)` does it, in half the time.
            self.append(tuple.__new__(Action, (stage, kind, number)))
            done[first] = number + 1
            if kind is Kind.BACKWARD:
                done[Kind.WEIGHT] += 1

    def done(self, stage: int, kind: Kind) -> int:
        """Number of the stage's actions of this kind; a full backward counts as one of each half."""
        return self._done[stage][kind]

    def up_to(self, microbatches: int) -> list[Action]:
        """The actions of the first `microbatches`; they are executable, since no microbatch waits for another."""
        return [action for action in self if action.microbatch < microbatches]
