"""1F1B: one forward, one backward in turn (PipeDream-Flush, arXiv 2006.09503; PipeDream, arXiv 1806.03377)."""

from __future__ import annotations

from titanlab.schedule.action import Action, ActionList, Kind
from titanlab.schedule.one_f_one_b_schema import OneFOneB
from titanlab.schedule.placement import looped


def placement(config: OneFOneB, *, ranks: int) -> list[int]:
    """Rank of each stage."""
    return looped(ranks=ranks)


def check(config: OneFOneB, *, ranks: int, microbatches: int) -> None:
    """Every number of ranks and microbatches will do."""


def actions(config: OneFOneB, *, ranks: int, microbatches: int) -> list[list[Action]]:
    """Actions by rank."""
    orders = []
    for rank in range(ranks):
        # As many as there are stages from here to the end: then the first gradient can be on its way back.
        warm_up = min(microbatches, ranks - rank)
        order = ActionList()
        order.add(rank, *[Kind.FORWARD] * warm_up)
        order.add(rank, *[Kind.BACKWARD, Kind.FORWARD] * (microbatches - warm_up))
        order.add(rank, *[Kind.BACKWARD] * warm_up)
        orders.append(list(order))
    return orders
