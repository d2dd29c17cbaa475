"""schedule=interleaved_1f1b and interleaved_zero_bubble: ranks with several stages run microbatches in rounds.

In a round, a rank runs some microbatches through its first stage, then the same through its second, and so on; backward
passes go from its last stage to its first (depth first, arXiv 2104.04473). In the paper a round has as many
microbatches as there are ranks, so their total is a multiple of the ranks. Here rounds are as equal as possible and
have at least as many microbatches as there are ranks, so any total works; if rounds are equal, the order is torch's.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

from titanlab.options import option
from titanlab.schedule.action import Action, Kind
from titanlab.schedule.placement import Looped, stages_of


@dataclass(kw_only=True)
class _Interleaved(Looped):
    """A schedule that runs microbatches in rounds; its subclasses say when the backward passes begin."""

    # How many more forward passes a rank runs before its first backward pass than the next rank does.
    _lead_per_rank: ClassVar[int]

    def peak_in_flight(self, *, ranks: int, microbatches: int) -> float:
        """The forward passes before the first backward pass, and one that runs before it in the same turn."""
        longest = len(rounds(ranks=ranks, microbatches=microbatches)[0])
        lead = (self.stages_per_rank - 1) * longest + self._lead_per_rank * (ranks - 1)
        return min(lead + 1, self.stages_per_rank * microbatches) / self.stages_per_rank

    def actions(self, *, ranks: int, microbatches: int) -> list[list[Action]]:
        """Actions by rank."""
        microbatches_by_round = rounds(ranks=ranks, microbatches=microbatches)
        longest = len(microbatches_by_round[0])
        orders = []
        for rank in range(ranks):
            stages = stages_of(self.placement(ranks=ranks), rank)
            forward = _steps(stages, microbatches_by_round)
            backward = _steps(stages[::-1], microbatches_by_round)
            lead = (len(stages) - 1) * longest + self._lead_per_rank * (ranks - 1 - rank)
            begins = self._backward_begins(rank, min(lead, len(forward)))
            orders.append(_in_turn([(Kind.FORWARD, forward, 0), *((kind, backward, at) for kind, at in begins)]))
        return orders

    def _backward_begins(self, rank: int, lead: int) -> list[tuple[Kind, int]]:
        """The kinds of a rank's backward passes, each with the number of forward passes before its first one.

        Args:
            lead: number of forward passes before the first backward pass.
        """
        raise NotImplementedError


@option("schedule", "interleaved_1f1b")
@dataclass(kw_only=True)
class Interleaved1F1B(_Interleaved):
    """1F1B with several stages per rank (arXiv 2104.04473, section 2.2)."""

    kind: str = "interleaved_1f1b"
    # A backward pass delays the gradient as long as a forward pass delays the activation.
    _lead_per_rank: ClassVar[int] = 2

    def splits_backward(self, *, ranks: int, microbatches: int) -> bool:
        """Never."""
        return False

    def _backward_begins(self, rank: int, lead: int) -> list[tuple[Kind, int]]:
        return [(Kind.BACKWARD, lead)]


@option("schedule", "interleaved_zero_bubble")
@dataclass(kw_only=True)
class InterleavedZeroBubble(_Interleaved):
    """Interleaved 1F1B that computes gradients of weights in otherwise idle time (ZB-H1, arXiv 2401.10241)."""

    kind: str = "interleaved_zero_bubble"
    # A gradient of the input arrives sooner than after a full backward pass, so a shorter lead is enough.
    _lead_per_rank: ClassVar[int] = 1

    def splits_backward(self, *, ranks: int, microbatches: int) -> bool:
        """Always."""
        return True

    def _backward_begins(self, rank: int, lead: int) -> list[tuple[Kind, int]]:
        # Gradients of weights lag by the rank's number: a later rank has gradients sooner, and has more idle time at
        # the end for the remaining gradients of weights.
        return [(Kind.INPUT, lead), (Kind.WEIGHT, lead + rank)]


def rounds(*, ranks: int, microbatches: int) -> list[range]:
    """Microbatches of every round, the larger rounds first."""
    count = max(1, microbatches // ranks)
    size, rest = divmod(microbatches, count)
    ends = list(accumulate([size + 1] * rest + [size] * (count - rest)))
    return [range(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def _steps(stages: list[int], microbatches_by_round: list[range]) -> list[tuple[int, int]]:
    """(stage, microbatch) in a rank's order; `stages`: those of the rank, in the direction of the pass."""
    return [(stage, number) for numbers in microbatches_by_round for stage in stages for number in numbers]


def _in_turn(passes: list[tuple[Kind, list[tuple[int, int]], int]]) -> list[Action]:
    """The actions of several kinds in turn: each kind with its (stage, microbatch) pairs, and the turn of the first."""
    turns = max(begin + len(steps) for _, steps, begin in passes)
    columns = [
        [*[None] * begin, *(Action(stage, kind, number) for stage, number in steps)] for kind, steps, begin in passes
    ]
    by_turn = [column + [None] * (turns - len(column)) for column in columns]
    return [action for turn in zip(*by_turn, strict=True) for action in turn if action is not None]
