"""schedule=interleaved_1f1b and interleaved_zero_bubble: ranks with several stages run microbatches in rounds.

In a round, a rank runs some microbatches through its first stage, then the same through its second, and so on; backward
passes go from its last stage to its first (depth first, arXiv 2104.04473). In the paper a round has as many
microbatches as there are ranks, so their total is a multiple of the ranks. Here rounds are as equal as possible and
have at least as many microbatches as there are ranks, so any total works; if rounds are equal, the order is torch's.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from titanlab.options import option
from titanlab.schedule.action import Action, Kind
from titanlab.schedule.placement import Looped, stages_of


@option("schedule", "interleaved_1f1b")
@dataclass(kw_only=True)
class Interleaved1F1B(Looped):
    """1F1B with several stages per rank (arXiv 2104.04473, section 2.2)."""

    kind: str = "interleaved_1f1b"

    def actions(self, *, ranks: int, microbatches: int) -> list[list[Action]]:
        """Actions by rank."""
        return [self._of_rank(rank, ranks, microbatches) for rank in range(ranks)]

    def _of_rank(self, rank: int, ranks: int, microbatches: int) -> list[Action]:
        stages = stages_of(self.placement(ranks=ranks), rank)
        forward = _steps(stages, ranks=ranks, microbatches=microbatches)
        backward = _steps(stages[::-1], ranks=ranks, microbatches=microbatches)
        lead = _warm_up(rank, ranks=ranks, stages_per_rank=len(stages), microbatches=microbatches, per_hop=2)
        order = []
        for step in range(lead + len(backward)):
            if step < len(forward):
                stage, microbatch = forward[step]
                order.append(Action(stage, Kind.FORWARD, microbatch))
            if step >= lead:
                stage, microbatch = backward[step - lead]
                order.append(Action(stage, Kind.BACKWARD, microbatch))
        return order


@option("schedule", "interleaved_zero_bubble")
@dataclass(kw_only=True)
class InterleavedZeroBubble(Looped):
    """Interleaved 1F1B that computes gradients of weights in otherwise idle time (ZB-H1, arXiv 2401.10241)."""

    kind: str = "interleaved_zero_bubble"

    def actions(self, *, ranks: int, microbatches: int) -> list[list[Action]]:
        """Actions by rank."""
        return [self._of_rank(rank, ranks, microbatches) for rank in range(ranks)]

    def _of_rank(self, rank: int, ranks: int, microbatches: int) -> list[Action]:
        stages = stages_of(self.placement(ranks=ranks), rank)
        forward = _steps(stages, ranks=ranks, microbatches=microbatches)
        backward = _steps(stages[::-1], ranks=ranks, microbatches=microbatches)
        # A gradient of the input arrives sooner than after a full backward pass, so a shorter lead is enough.
        lead = _warm_up(rank, ranks=ranks, stages_per_rank=len(stages), microbatches=microbatches, per_hop=1)
        # Gradients of weights lag by the rank's number: a later rank has gradients sooner, and has more idle time at
        # the end for the remaining gradients of weights.
        lag = rank
        order = []
        for step in range(lead + len(backward)):
            if step < len(forward):
                stage, microbatch = forward[step]
                order.append(Action(stage, Kind.FORWARD, microbatch))
            if step >= lead:
                stage, microbatch = backward[step - lead]
                order.append(Action(stage, Kind.INPUT, microbatch))
            if step >= lead + lag:
                stage, microbatch = backward[step - lead - lag]
                order.append(Action(stage, Kind.WEIGHT, microbatch))
        done = max(0, len(backward) - lag)
        return order + [Action(stage, Kind.WEIGHT, microbatch) for stage, microbatch in backward[done:]]


def rounds(*, ranks: int, microbatches: int) -> list[range]:
    """Microbatches of every round, the larger rounds first."""
    count = max(1, microbatches // ranks)
    size, rest = divmod(microbatches, count)
    ends = list(accumulate([size + 1] * rest + [size] * (count - rest)))
    return [range(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def _steps(stages: list[int], *, ranks: int, microbatches: int) -> list[tuple[int, int]]:
    """(stage, microbatch) in a rank's order; `stages`: those of the rank, in the direction of the pass."""
    return [
        (stage, number)
        for microbatches_of_round in rounds(ranks=ranks, microbatches=microbatches)
        for stage in stages
        for number in microbatches_of_round
    ]


def _warm_up(rank: int, *, ranks: int, stages_per_rank: int, microbatches: int, per_hop: int) -> int:
    """Number of a rank's forward passes before forward and backward alternate.

    Args:
        per_hop: how many more than on the next rank: 2 if a backward pass delays the gradient as long as a forward pass
            delays the activation.
    """
    longest = len(rounds(ranks=ranks, microbatches=microbatches)[0])
    wanted = (stages_per_rank - 1) * longest + per_hop * (ranks - 1 - rank)
    return min(wanted, stages_per_rank * microbatches)
