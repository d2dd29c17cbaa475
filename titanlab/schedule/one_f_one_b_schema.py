"""schedule=1f1b: one forward, one backward in turn (PipeDream-Flush, arXiv 2006.09503; PipeDream, arXiv 1806.03377)."""

from __future__ import annotations

from dataclasses import dataclass

from titanlab.options import option
from titanlab.schedule.action import Action, ActionList, Kind
from titanlab.schedule.placement import OneStage


@option("schedule", "1f1b")
@dataclass(kw_only=True)
class OneFOneB(OneStage):
    """Forward and backward passes alternate as soon as the first gradient can arrive."""

    kind: str = "1f1b"

    def splits_backward(self, *, ranks: int, microbatches: int) -> bool:
        """Never."""
        return False

    def peak_in_flight(self, *, ranks: int, microbatches: int) -> float:
        """One for each stage, if there are as many."""
        return min(ranks, microbatches)

    def actions(self, *, ranks: int, microbatches: int) -> list[list[Action]]:
        """Actions by rank."""
        orders = []
        for rank in range(ranks):
            # The number of stages from this rank to the last: after that many, the first gradient can arrive.
            warm_up = min(microbatches, ranks - rank)
            order = ActionList()
            order.add(rank, *[Kind.FORWARD] * warm_up)
            order.add(rank, *[Kind.BACKWARD, Kind.FORWARD] * (microbatches - warm_up))
            order.add(rank, *[Kind.BACKWARD] * warm_up)
            orders.append(list(order))
        return orders
