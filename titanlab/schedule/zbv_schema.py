"""schedule=zbv: zero bubble over stages laid out as a V (arXiv 2401.10241, section 6).

A rank is never idle between its first and its last action if F, I and W take the same time and there are at least
2·ranks − 1 microbatches. Ranks still begin and end at different times. In the paper a rank that has ended begins the
next step; here all ranks end a step together, because they compute the norm of the gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

from titanlab.options import option
from titanlab.schedule.action import Action, ActionList, Kind
from titanlab.schedule.placement import VShaped

F, I, W = Kind.FORWARD, Kind.INPUT, Kind.WEIGHT  # noqa: E741


@option("schedule", "zbv")
@dataclass(kw_only=True)
class ZBV(VShaped):
    """Zero bubble over stages laid out as a V."""

    kind: str = "zbv"

    def splits_backward(self, *, ranks: int, microbatches: int) -> bool:
        """Always."""
        return True

    def peak_in_flight(self, *, ranks: int, microbatches: int) -> float:
        """One for each rank, if there are as many."""
        return min(ranks, microbatches)

    def actions(self, *, ranks: int, microbatches: int) -> list[list[Action]]:
        """Actions by rank."""
        # The construction needs 2·ranks − 1 microbatches; for fewer, the actions of the others are left out.
        count = max(2 * ranks - 1, microbatches)
        return [_of_rank(rank, ranks=ranks, microbatches=count).up_to(microbatches) for rank in range(ranks)]


def _of_rank(rank: int, *, ranks: int, microbatches: int) -> ActionList:
    down, up = rank, 2 * ranks - 1 - rank  # the rank's stages in the first and in the second half of the V
    order = ActionList()
    # Warm-up: forward passes of the first half of the V, then of both halves, then backward passes of the second half.
    order.add(down, *[F] * (2 * (ranks - rank) - 1))
    for _ in range(rank):
        order.add(up, F)
        order.add(down, F)
    for _ in range(ranks - rank):
        order.add(up, F, I, W)
    # Steady: forward and backward through both stages, until the first half has run all microbatches.
    for _ in range(microbatches - ranks):
        if order.done(down, F) < microbatches:
            order.add(down, F)
        order.add(down, I, W)
        order.add(up, F, I, W)
    # Cool-down: gradients of inputs first; those of weights fill idle time.
    for _ in range(rank):
        order.add(down, I)
        order.add(up, I)
    for _ in range(ranks - rank):
        order.add(down, I, W)
    order.add(up, *[W] * rank)
    order.add(down, *[W] * rank)
    return order
