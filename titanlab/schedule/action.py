"""What a rank of a pipeline does: one stage's forward or backward pass over one microbatch."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """What is computed; the letters are those of torch's schedules."""

    FORWARD = "F"
    BACKWARD = "B"  # both halves at once
    INPUT = "I"  # the gradient of the stage's input only, which the stage before waits for
    WEIGHT = "W"  # the gradient of the stage's weights, which nobody waits for


class Action(NamedTuple):
    """One computation; `str` gives torch's notation: "2F0"."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class ActionList(list[Action]):
    """Actions of one rank, in which each stage takes its microbatches in order, every kind for itself."""

    def __init__(self) -> None:
        super().__init__()
        self._done: Counter[tuple[int, Kind]] = Counter()

    def add(self, stage: int, *kinds: Kind) -> None:
        """Append these kinds for the stage, each with the next microbatch that has not had it."""
        for kind in kinds:
            # A whole backward is both halves.
            halves = (Kind.INPUT, Kind.WEIGHT) if kind is Kind.BACKWARD else (kind,)
            self.append(Action(stage, kind, self._done[stage, halves[0]]))
            self._done.update((stage, half) for half in halves)

    def done(self, stage: int, kind: Kind) -> int:
        """How many microbatches the stage has had this kind for."""
        return self._done[stage, kind]

    def up_to(self, microbatches: int) -> list[Action]:
        """Those of the first microbatches. No microbatch waits for another, so the rest stays executable."""
        return [action for action in self if action.microbatch < microbatches]
