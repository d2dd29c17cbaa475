"""When each action of a schedule runs, how long ranks are idle, and how much they keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from titanlab.schedule.action import Action, Kind
from titanlab.schedule.order import Orders, executed

# Seconds, or any other unit, of each kind: one number for all stages, or one for each.
Durations = Mapping[Kind, float | Sequence[float]]

# A product has as many FLOPs as each of its two gradients.
DURATIONS: Durations = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.INPUT: 1.0, Kind.WEIGHT: 1.0}


class Event(NamedTuple):
    """An action and when it runs."""

    action: Action
    begin: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A schedule as it runs when every action begins as soon as it can.

    Attributes:
        events: by rank, in order.
        placement: rank of each stage.
        duration: from the first action's begin to the last one's end, in the unit of the given durations.
        bubble_share: idle share of all ranks' time, 0 to 1.
        peak_in_flight: by rank, the most microbatches whose activations it keeps at a time. A stage keeps a
            microbatch's from the begin of F to the end of B or W (I frees only a part), and counts for its
            share of the rank's stages: half a microbatch, where the rank has two.
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
        orders: actions by rank.
        placement: rank of each stage.
        durations: of each kind.
        transfer: time that a tensor takes from one rank to another; both compute meanwhile.

    Raises:
        OrderError: ranks wait for each other, or for an action that no rank has.
    """
    events: list[list[Event]] = [[] for _ in orders]
    ends: dict[Action, float] = {}
    for rank, action, needs in executed(orders, stages=len(placement)):
        arrivals = [ends[need] + (transfer if placement[need.stage] != rank else 0.0) for need in needs]
        begin = max([events[rank][-1].end if events[rank] else 0.0, *arrivals])
        ends[action] = begin + _time(durations, action)
        events[rank].append(Event(action, begin, ends[action]))
    duration = max(ends.values(), default=0.0)
    busy = sum(event.end - event.begin for row in events for event in row)
    return Timeline(
        events=events,
        placement=list(placement),
        duration=duration,
        bubble_share=max(0.0, 1 - busy / (duration * len(orders))) if duration > 0 else 0.0,
        peak_in_flight=[peak_in_flight(order) for order in orders],
    )


def peak_in_flight(order: Sequence[Action]) -> float:
    """The most microbatches whose activations one rank keeps, given its actions; see `Timeline`."""
    alive = peak = 0
    for action in order:
        if action.kind is Kind.FORWARD:
            alive += 1
            peak = max(peak, alive)
        elif action.kind in (Kind.BACKWARD, Kind.WEIGHT):
            alive -= 1
    return peak / max(1, len({action.stage for action in order}))


def _time(durations: Durations, action: Action) -> float:
    given = durations[action.kind]
    return given[action.stage] if isinstance(given, Sequence) else given
