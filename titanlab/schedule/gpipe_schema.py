"""schedule=gpipe: all microbatches forward, then all backward (arXiv 1811.06965)."""

from __future__ import annotations

from dataclasses import dataclass

from titanlab.options import option
from titanlab.schedule.action import Action, ActionList, Kind
from titanlab.schedule.placement import OneStage


@option("schedule", "gpipe")
@dataclass(kw_only=True)
class GPipe(OneStage):
    """All microbatches forward, then all backward."""

    kind: str = "gpipe"

    def splits_backward(self, *, ranks: int, microbatches: int) -> bool:
        """Never."""
        return False

    def peak_in_flight(self, *, ranks: int, microbatches: int) -> float:
        """All microbatches."""
        return microbatches

    def actions(self, *, ranks: int, microbatches: int) -> list[list[Action]]:
        """Actions by rank."""
        orders = []
        for rank in range(ranks):
            order = ActionList()
            order.add(rank, *[Kind.FORWARD] * microbatches, *[Kind.BACKWARD] * microbatches)
            orders.append(list(order))
        return orders
