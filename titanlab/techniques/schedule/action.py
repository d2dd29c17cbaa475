"""Actions of a pipeline's ranks; the rules that make lists of actions a schedule; a schedule's simulated timeline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from titanlab.errors import TitanlabError


class Kind(StrEnum):
    """Kind of a computation, with the letters of torch's schedules."""

    FORWARD = "F"
    BACKWARD = "B"  # I and W at once
    INPUT = "I"  # only the gradient of the stage's input, for which the previous stage waits
    WEIGHT = "W"  # the gradient of the stage's weights, for which no stage waits


class Action(NamedTuple):
    """One computation; `str` gives torch's notation: "2F0"."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


# B also makes the result of I: the gradient of the input.
_RESULT = {kind: Kind.INPUT if kind is Kind.BACKWARD else kind for kind in Kind}
# Kind of an action → the results that it needs: each one's kind, and how many stages after the action's it comes from.
_NEEDS: Mapping[Kind, Sequence[tuple[Kind, int]]] = {
    Kind.FORWARD: [(Kind.FORWARD, -1)],
    Kind.BACKWARD: [(Kind.FORWARD, 0), (Kind.INPUT, 1)],
    Kind.INPUT: [(Kind.FORWARD, 0), (Kind.INPUT, 1)],
    Kind.WEIGHT: [(Kind.INPUT, 0)],
}
# Kind → kinds that exclude it for the same stage and microbatch: these have either B, or I and W.
_EXCLUDED = {
    Kind.FORWARD: (),
    Kind.BACKWARD: (Kind.INPUT, Kind.WEIGHT),
    Kind.INPUT: (Kind.BACKWARD,),
    Kind.WEIGHT: (Kind.BACKWARD,),
}
_SHOWN = 4  # waiting ranks that a message names: enough to see a cycle


class ActionList(list[Action]):
    """Actions of one rank; for each kind, a stage takes its microbatches in order."""

    def __init__(self) -> None:
        super().__init__()
        self._done: defaultdict[int, dict[Kind, int]] = defaultdict(lambda: dict.fromkeys(Kind, 0))

    def add(self, stage: int, *kinds: Kind) -> None:
        """Append an action of the stage for each kind, with the next microbatch of that kind."""
        done = self._done[stage]
        for kind in kinds:
            number = done[_RESULT[kind]]
            # The same as `Action(stage, kind, number)`, in half the time.
            self.append(tuple.__new__(Action, (stage, kind, number)))
            done[_RESULT[kind]] = number + 1
            if kind is Kind.BACKWARD:
                done[Kind.WEIGHT] += 1

    def done(self, stage: int, kind: Kind) -> int:
        """Number of the stage's actions of this kind; a full backward (B) counts as one I and one W."""
        return self._done[stage][kind]


Orders = Sequence[Sequence[Action]]  # by rank


class OrderError(TitanlabError):
    """Raised if lists of actions are not a schedule.

    Attributes:
        index: place of the faulty action in the rank's list; None: an action is missing.
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
    for rank, order in enumerate(orders):
        for index, action in enumerate(order):
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
    for rank, order in enumerate(orders):
        for index, action in enumerate(order):
            rule = ""
            if not (0 <= action.stage < len(placement) and 0 <= action.microbatch < microbatches):
                rule = f"{action}: there are {len(placement)} stages and {microbatches} microbatches, counted from 0"
            elif placement[action.stage] != rank:
                rule = f"{action}: stage {action.stage} is on rank {placement[action.stage]}"
            elif action in seen:
                rule = f"{action} occurs twice"
            elif any(action._replace(kind=other) in seen for other in _EXCLUDED[action.kind]):
                rule = f"{action}: the backward pass is B, or I and W, not both"
            if rule:
                raise OrderError(rank, index, rule)
            seen.add(action)
    for stage, rank in enumerate(placement):
        for microbatch in range(microbatches):
            forward, backward, of_input, of_weight = (Action(stage, kind, microbatch) for kind in Kind)
            if forward not in seen:
                raise OrderError(rank, None, f"{forward} is missing")
            lacking = [half for half in (of_input, of_weight) if half not in seen]
            if lacking and backward not in seen:
                missing = str(lacking[0]) if len(lacking) == 1 else f"{backward}, or I and W instead,"
                raise OrderError(rank, None, f"{missing} is missing")
    for _ in executed(orders, stages=len(placement)):
        pass


def executed(orders: Orders, *, stages: int) -> Iterator[tuple[int, Action, list[int]]]:
    """Yield each action with its rank and its needs, in an order in which all actions can be executed.

    Needs are numbers of other actions, counted from 0 in the order in which this function yields them.

    Raises:
        OrderError: the remaining actions wait for each other; the message names the waiting actions.
    """
    span = 1 + max((action.microbatch for order in orders for action in order), default=0)
    # For each kind of result: at index stage · span + microbatch, the number of the action that made it.
    made: dict[Kind, list[int | None]] = {kind: [None] * (stages * span) for kind in Kind}
    # For each kind and stage, the needs of an action: (list in `made`, offset of the needed entry from the own index).
    sources = {
        kind: [
            [(made[result], step * span) for result, step in _NEEDS[kind] if 0 <= stage + step < stages]
            for stage in range(stages)
        ]
        for kind in Kind
    }
    results = {kind: made[_RESULT[kind]] for kind in Kind}
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
        raise OrderError(left[0], places[left[0]], "; ".join(_waits(orders, places, left, stages)))


def _waits(orders: Orders, places: Sequence[int], stuck: Sequence[int], stages: int) -> Iterator[str]:
    """A text for each stuck rank: what it waits for. `places`: by rank, the index of the first action still to run."""
    # (stage, kind, microbatch) of a result → whether its action has run, the action's rank, and the action.
    known: dict[tuple[int, Kind, int], tuple[bool, int, Action]] = {}
    for rank, order in enumerate(orders):
        for index, action in enumerate(order):
            known[action.stage, _RESULT[action.kind], action.microbatch] = (index < places[rank], rank, action)
    for rank in stuck[:_SHOWN]:
        waiting = orders[rank][places[rank]]
        stage, kind, microbatch = waiting
        needs = [
            Action(stage + step, result, microbatch) for result, step in _NEEDS[kind] if 0 <= stage + step < stages
        ]
        need = next(need for need in needs if need not in known or not known[need][0])
        if need not in known:
            yield f"{waiting} on rank {rank} waits for {need}, which is on no rank"
            continue
        _, owner, action = known[need]
        blocker = orders[owner][places[owner]]
        after = "" if blocker == action else f" after {blocker}"
        yield f"{waiting} on rank {rank} waits for {action}, which comes{after} on rank {owner}"
    if len(stuck) > _SHOWN:
        yield f"and {len(stuck) - _SHOWN} more ranks wait"


# Duration of each kind in seconds or any other unit: one number for all stages, or one for each stage.
Durations = Mapping[Kind, float | Sequence[float]]

# Each of the two gradients of a matrix product takes as many FLOPs as the product.
DURATIONS: Mapping[Kind, float] = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.INPUT: 1.0, Kind.WEIGHT: 1.0}


class Event(NamedTuple):
    """An action with its begin and end."""

    action: Action
    begin: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The times of a schedule in which every action begins as soon as it can.

    Attributes:
        duration: from the begin of the first action to the end of the last, in the unit of the durations.
        bubble_share: idle share of all ranks' time, 0 to 1.
        peak_in_flight: by rank, the largest number of microbatches whose activations it keeps at the same time. A stage
            keeps them from the begin of F to the end of B or W (I frees only a part). With n stages per rank, each
            stage counts as 1/n of a microbatch.
    """

    events: list[list[Event]]
    placement: list[int]
    duration: float
    bubble_share: float
    peak_in_flight: list[float]


def simulate(
    orders: Orders, placement: Sequence[int], durations: Durations = DURATIONS, *, transfer: float = 0.0
) -> Timeline:
    """Compute when each action of a schedule runs.

    Args:
        transfer: time to send a tensor from one rank to another; both ranks compute meanwhile.

    Raises:
        OrderError: ranks wait for each other, or for an action that no rank has.
    """
    events: list[list[Event]] = [[] for _ in orders]
    ends: list[tuple[float, int]] = []  # of each action: time and rank
    for rank, action, needs in executed(orders, stages=len(placement)):
        arrivals = [ends[need][0] + (transfer if ends[need][1] != rank else 0.0) for need in needs]
        begin = max([events[rank][-1].end if events[rank] else 0.0, *arrivals])
        length = durations[action.kind]
        end = begin + (length[action.stage] if isinstance(length, Sequence) else length)
        ends.append((end, rank))
        events[rank].append(Event(action, begin, end))
    duration = max((end for end, _ in ends), default=0.0)
    busy = sum(event.end - event.begin for row in events for event in row)
    return Timeline(
        events=events,
        placement=list(placement),
        duration=duration,
        bubble_share=max(0.0, 1 - busy / (duration * len(orders))) if duration > 0 else 0.0,
        peak_in_flight=[peak_in_flight(order) for order in orders],
    )


def peak_in_flight(order: Sequence[Action]) -> float:
    """The largest number of microbatches whose activations one rank keeps; see `Timeline`."""
    alive = peak = 0
    for action in order:
        if action.kind is Kind.FORWARD:
            alive += 1
            peak = max(peak, alive)
        elif action.kind in (Kind.BACKWARD, Kind.WEIGHT):
            alive -= 1
    return peak / max(1, len({action.stage for action in order}))
