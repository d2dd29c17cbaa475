"""GPipe: all microbatches forward, then all backward (arXiv 1811.06965)."""

from __future__ import annotations

from titanlab.schedule.action import Action, ActionList, Kind
from titanlab.schedule.gpipe_schema import GPipe
from titanlab.schedule.placement import looped


def placement(config: GPipe, *, ranks: int) -> list[int]:
    """Rank of each stage."""
    return looped(ranks=ranks)


def check(config: GPipe, *, ranks: int, microbatches: int) -> None:
    """Every number of ranks and microbatches will do."""


def actions(config: GPipe, *, ranks: int, microbatches: int) -> list[list[Action]]:
    """Actions by rank."""
    orders = []
    for rank in range(ranks):
        order = ActionList()
        order.add(rank, *[Kind.FORWARD] * microbatches, *[Kind.BACKWARD] * microbatches)
        orders.append(list(order))
    return orders
