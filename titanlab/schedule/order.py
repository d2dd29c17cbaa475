"""Checks that lists of actions are a schedule: complete, each stage on one rank, and without a deadlock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from titanlab.errors import TitanlabError
from titanlab.schedule.action import Action, Kind

Orders = Sequence[Sequence[Action]]  # by rank


class OrderError(TitanlabError):
    """Lists of actions are not a schedule.

    Attributes:
        rank: of the faulty list.
        index: of the faulty action in that list; None: an action is missing.
        rule: the broken rule.
    """

    def __init__(self, rank: int, index: int | None, rule: str) -> None:
        self.rank, self.index, self.rule = rank, index, rule
        place = "" if index is None else f", action {index + 1}"
        super().__init__(f"rank {rank}{place}: {rule}")

    def __reduce__(self) -> tuple[type[OrderError], tuple[int, int | None, str]]:
        return (type(self), (self.rank, self.index, self.rule))


def placement_of(orders: Orders) -> list[int]:
    """Rank of each stage in the lists.

    Raises:
        OrderError: a stage is on two ranks or on none, or a rank has no stage.
    """
    owners: dict[int, int] = {}
    for rank, index, action in _all(orders):
        owner = owners.setdefault(action.stage, rank)
        if owner != rank:
            raise OrderError(rank, index, f"{action}: stage {action.stage} is on rank {owner} already")
    for rank, order in enumerate(orders):
        if not order:
            raise OrderError(rank, None, "has no action")
    missing = [stage for stage in range(len(owners)) if stage not in owners]
    if missing:
        last = max(owners)
        raise OrderError(owners[last], None, f"there is a stage {last}, but no rank has stage {missing[0]}")
    return [owners[stage] for stage in range(len(owners))]


def validate(orders: Orders, placement: Sequence[int], *, microbatches: int) -> None:
    """Check that lists of actions are a schedule.

    Each stage runs every microbatch forward once and backward once, as B or as I and then W, on its rank, and every
    action comes after the actions that it needs.

    Raises:
        OrderError: the first broken rule.
    """
    seen: set[Action] = set()
    for rank, index, action in _all(orders):
        if not (0 <= action.stage < len(placement) and 0 <= action.microbatch < microbatches):
            rule = f"{action}: there are {len(placement)} stages and {microbatches} microbatches, counted from 0"
            raise OrderError(rank, index, rule)
        if placement[action.stage] != rank:
            raise OrderError(rank, index, f"{action}: stage {action.stage} is on rank {placement[action.stage]}")
        if action in seen:
            raise OrderError(rank, index, f"{action} is there twice")
        if any(action._replace(kind=other) in seen for other in _EXCLUDED[action.kind]):
            rule = f"{action}: the backward pass is B, or I and W, not both"
            raise OrderError(rank, index, rule)
        seen.add(action)
    for stage, rank in enumerate(placement):
        for microbatch in range(microbatches):
            missing = _missing(seen, stage, microbatch)
            if missing:
                raise OrderError(rank, None, f"{missing} is missing")
    list(executed(orders, stages=len(placement)))


def executed(orders: Orders, *, stages: int) -> Iterator[tuple[int, Action, list[Action]]]:
    """Yield rank, action and the actions that it needs, in an order in which all can be executed.

    The needed actions are those of the lists: the gradient of a stage's input comes from its B or its I.

    Raises:
        OrderError: the remaining actions wait for each other; the message names the waiting actions.
    """
    done: dict[Action, Action] = {}  # available result → the action that made it
    places = [0] * len(orders)
    progress = True
    while progress:
        progress = False
        for rank, order in enumerate(orders):
            while places[rank] < len(order):
                action = order[places[rank]]
                needs = _needs(action, stages)
                if not all(need in done for need in needs):
                    break
                yield rank, action, [done[need] for need in needs]
                done[_result(action)] = action
                places[rank] += 1
                progress = True
    left = [rank for rank, order in enumerate(orders) if places[rank] < len(order)]
    if left:
        raise OrderError(left[0], places[left[0]], "; ".join(_waits(orders, places, done, stages)))


# A microbatch has either B or I and W.
_EXCLUDED = {
    Kind.FORWARD: (),
    Kind.BACKWARD: (Kind.INPUT, Kind.WEIGHT),
    Kind.INPUT: (Kind.BACKWARD,),
    Kind.WEIGHT: (Kind.BACKWARD,),
}
_SHOWN = 4  # waiting ranks that a message names: enough to see a cycle


def _all(orders: Orders) -> Iterator[tuple[int, int, Action]]:
    for rank, order in enumerate(orders):
        for index, action in enumerate(order):
            yield rank, index, action


def _missing(seen: set[Action], stage: int, microbatch: int) -> str:
    """An action that a stage lacks for a microbatch; empty if it has all."""
    has = {kind: Action(stage, kind, microbatch) in seen for kind in Kind}
    if not has[Kind.FORWARD]:
        return str(Action(stage, Kind.FORWARD, microbatch))
    if has[Kind.BACKWARD] or (has[Kind.INPUT] and has[Kind.WEIGHT]):
        return ""
    if has[Kind.INPUT] or has[Kind.WEIGHT]:
        return str(Action(stage, Kind.WEIGHT if has[Kind.INPUT] else Kind.INPUT, microbatch))
    return f"{Action(stage, Kind.BACKWARD, microbatch)}, or I and W instead,"


def _result(action: Action) -> Action:
    """The name of an action's result: B gives the gradient of the input, as I does."""
    return action._replace(kind=Kind.INPUT) if action.kind is Kind.BACKWARD else action


def _needs(action: Action, stages: int) -> list[Action]:
    stage, kind, microbatch = action
    if kind is Kind.FORWARD:
        return [Action(stage - 1, kind, microbatch)] if stage > 0 else []
    if kind is Kind.WEIGHT:
        return [Action(stage, Kind.INPUT, microbatch)]
    own = [Action(stage, Kind.FORWARD, microbatch)]
    return [*own, Action(stage + 1, Kind.INPUT, microbatch)] if stage < stages - 1 else own


def _waits(orders: Orders, places: list[int], done: dict[Action, Action], stages: int) -> Iterator[str]:
    remaining = {
        _result(action): (rank, action) for rank, order in enumerate(orders) for action in order[places[rank] :]
    }
    stuck = [rank for rank, order in enumerate(orders) if places[rank] < len(order)]
    for rank in stuck[:_SHOWN]:
        waiting = orders[rank][places[rank]]
        need = next(need for need in _needs(waiting, stages) if need not in done)
        if need not in remaining:
            yield f"{waiting} on rank {rank} waits for {need}, which is on no rank"
            continue
        owner, action = remaining[need]
        blocker = orders[owner][places[owner]]
        after = "" if blocker == action else f" after {blocker}"
        yield f"{waiting} on rank {rank} waits for {action}, which comes{after} on rank {owner}"
    if len(stuck) > _SHOWN:
        yield f"and {len(stuck) - _SHOWN} more ranks wait"
