"""The simulated timeline of a schedule: times of actions, idle time, and microbatches in flight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from titanlab.techniques.schedule.action import Action, Kind, Orders, executed

# Duration of each kind in seconds or any other unit: one number for all stages, or one for each stage.
Durations = Mapping[Kind, float | Sequence[float]]

# Each of a matrix product's two gradients has as many FLOPs as the product.
DURATIONS: Durations = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.INPUT: 1.0, Kind.WEIGHT: 1.0}


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
        end = begin + _time(durations, action)
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


def _time(durations: Durations, action: Action) -> float:
    duration = durations[action.kind]
    return duration[action.stage] if isinstance(duration, Sequence) else duration
