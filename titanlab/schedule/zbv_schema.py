"""schedule=zbv: zero bubble over stages laid out as a V (arXiv 2401.10241, section 6).

Between its first and its last action a rank never idles where F, I and W take equally long and there are microbatches
enough, 2·ranks − 1. What remains is the slant: a rank begins and ends later than another. In the paper a rank that has
ended begins the next step; here a step ends for all at once, with the norm of the gradients.
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

    def actions(self, *, ranks: int, microbatches: int) -> list[list[Action]]:
        """Actions by rank."""
        # The shape needs at least so many microbatches; of fewer, it is what remains when the others are taken out.
        whole = max(2 * ranks - 1, microbatches)
        return [_of_rank(rank, ranks=ranks, microbatches=whole).up_to(microbatches) for rank in range(ranks)]


def _of_rank(rank: int, *, ranks: int, microbatches: int) -> ActionList:
    down, up = rank, 2 * ranks - 1 - rank  # the rank's stage on the way there, and on the way back
    order = ActionList()
    # Warm-up: fill the way there, then both ways, then the way back with its own backward passes.
    order.add(down, *[F] * (2 * (ranks - rank) - 1))
    for _ in range(rank):
        order.add(up, F)
        order.add(down, F)
    for _ in range(ranks - rank):
        order.add(up, F, I, W)
    # Steady: forward and backward through both stages, until the way there has had all microbatches.
    for _ in range(microbatches - ranks):
        if order.done(down, F) < microbatches:
            order.add(down, F)
        order.add(down, I, W)
        order.add(up, F, I, W)
    # Cool-down: gradients of inputs first, those of weights where nothing else is left to do.
    for _ in range(rank):
        order.add(down, I)
        order.add(up, I)
    for _ in range(ranks - rank):
        order.add(down, I, W)
    order.add(up, *[W] * rank)
    order.add(down, *[W] * rank)
    return order
