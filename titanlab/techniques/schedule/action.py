"""Actions of a pipeline's ranks, and the rules that make lists of them a schedule: complete, and without a deadlock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from titanlab.errors import TitanlabError


class Kind(StrEnum):
    """Kind of a computation, with the letters of torch's schedules."""

    FORWARD = "F"
    BACKWARD = "B"  # both halves at once
    INPUT = "I"  # only the gradient of the stage's input, for which the previous stage waits
    WEIGHT = "W"  # the gradient of the stage's weights, for which no stage waits


class Action(NamedTuple):
    """One computation; `str` gives torch's notation: "2F0"."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class ActionList(list[Action]):
    """Actions of one rank; for each kind, a stage takes its microbatches in order."""

    def __init__(self) -> None:
        super().__init__()
        self._done: defaultdict[int, dict[Kind, int]] = defaultdict(lambda: dict.fromkeys(Kind, 0))

    def add(self, stage: int, *kinds: Kind) -> None:
        """Append an action of the stage for each kind, with the next microbatch of that kind."""
        done = self._done[stage]
        for kind in kinds:
            number = done[_result(kind)]
            # As `Action(stage, kind, number)` does it, in half the time.
            self.append(tuple.__new__(Action, (stage, kind, number)))
            done[_result(kind)] = number + 1
            if kind is Kind.BACKWARD:
                done[Kind.WEIGHT] += 1

    def done(self, stage: int, kind: Kind) -> int:
        """Number of the stage's actions of this kind; a full backward counts as one of each half."""
        return self._done[stage][kind]

    def up_to(self, microbatches: int) -> list[Action]:
        """The actions of the first `microbatches`; they are executable, since no microbatch waits for another."""
        return [action for action in self if action.microbatch < microbatches]


Orders = Sequence[Sequence[Action]]  # by rank


class OrderError(TitanlabError):
    """Lists of actions are not a schedule.

    Attributes:
        index: of the faulty action in that list; None: an action is missing.
    """

    def __init__(self, rank: int, index: int | None, rule: str) -> None:
        self.rank, self.index, self.rule = rank, index, rule
        place = "" if index is None else f", action {index + 1}"
        super().__init__(f"rank {rank}{place}: {rule}")

    def __reduce__(self) -> tuple[type[OrderError], tuple[int, int | None, str]]:
        return (type(self), (self.rank, self.index, self.rule))


def placement_of(orders: Orders) -> list[int]:
    """Rank of each stage in the lists. OrderError: a stage is on two ranks or on none, or a rank has no stage."""
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

    Each stage runs every microbatch forward once and backward once, as B, or as I and then W, on its rank; every action
    comes after the actions that it needs.
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


def executed(orders: Orders, *, stages: int) -> Iterator[tuple[int, Action, list[int]]]:
    """Yield rank, action and what the action needs, in an order in which all can be executed.

    Needs are numbers of other actions, counted from 0 in the order in which this function yields them.

    Raises:
        OrderError: the remaining actions wait for each other; the message names the waiting actions.
    """
    span = 1 + max((action.microbatch for order in orders for action in order), default=0)
    # For each kind of result: at index stage · span + microbatch, the number of the action that made it.
    made: dict[Kind, list[int | None]] = {kind: [None] * (stages * span) for kind in Kind}
    # For each kind and stage: the lists with the results that an action needs, and the offset to its own index.
    sources = {
        kind: [
            [(made[result], step * span) for result, step in _NEEDS[kind] if 0 <= stage + step < stages]
            for stage in range(stages)
        ]
        for kind in Kind
    }
    results = {kind: made[_result(kind)] for kind in Kind}
    streams = [iter(order) for order in orders]
    following = [next(stream, None) for stream in streams]
    number, before = 0, -1
    while number > before:
        before = number
        for rank, stream in enumerate(streams):
            action = following[rank]
            while action is not None:
                stage, kind, microbatch = action
                place = stage * span + microbatch
                needs = [source[place + away] for source, away in sources[kind][stage]]
                if None in needs:
                    break
                yield rank, action, needs  # type: ignore[misc]  # none is None
                results[kind][place] = number
                number += 1
                action = next(stream, None)
            following[rank] = action
    left = [rank for rank, action in enumerate(following) if action is not None]
    if left:
        undone = [len(list(stream)) + (action is not None) for stream, action in zip(streams, following, strict=True)]
        places = [len(order) - count for order, count in zip(orders, undone, strict=True)]
        raise OrderError(left[0], places[left[0]], "; ".join(_waits(orders, places, stages)))


# What an action of each kind needs: the kind of a result, and how many stages after its own.
_NEEDS: Mapping[Kind, Sequence[tuple[Kind, int]]] = {
    Kind.FORWARD: [(Kind.FORWARD, -1)],
    Kind.BACKWARD: [(Kind.FORWARD, 0), (Kind.INPUT, 1)],
    Kind.INPUT: [(Kind.FORWARD, 0), (Kind.INPUT, 1)],
    Kind.WEIGHT: [(Kind.INPUT, 0)],
}
# A microbatch has either B, or I and W.
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


def _result(kind: Kind) -> Kind:
    """The kind of an action's result: B gives the gradient of the input, as I does."""
    return Kind.INPUT if kind is Kind.BACKWARD else kind


def _needs(action: Action, stages: int) -> list[Action]:
    stage, kind, microbatch = action
    return [Action(stage + step, result, microbatch) for result, step in _NEEDS[kind] if 0 <= stage + step < stages]


def _waits(orders: Orders, places: list[int], stages: int) -> Iterator[str]:
    done = {_made(action) for order, place in zip(orders, places, strict=True) for action in order[:place]}
    remaining = {_made(action): (rank, action) for rank, order in enumerate(orders) for action in order[places[rank] :]}
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


def _made(action: Action) -> Action:
    """The name of an action's result."""
    return action._replace(kind=_result(action.kind))
