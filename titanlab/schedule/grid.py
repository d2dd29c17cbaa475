"""A timeline as text: one row for each rank, time from left to right."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from titanlab.schedule.action import Action, Kind
from titanlab.schedule.placement import stages_of
from titanlab.schedule.timeline import Event, Timeline

WORDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "gradient of input",
    Kind.WEIGHT: "gradient of weights",
}
# Background colours, of the terminal's 256: for a rank's first stage, and for its later stages.
_COLOURS = {
    Kind.FORWARD: (117, 68),
    Kind.BACKWARD: (157, 71),
    Kind.INPUT: (123, 37),
    Kind.WEIGHT: (222, 172),
}
_OFF = "\x1b[0m"
_LEAST_ROOM = 10
_MOST_BLOCKS = 20  # most blocks of rows below each other; in a longer timeline a column is more time
_IDLE = {True: " ", False: "."}


def rows(timeline: Timeline, *, width: int | None, coloured: bool) -> list[str]:
    """The lines of a timeline, wrapped into blocks of rows if it is too long, with a legend below.

    A cell has kind and microbatch if there is room for both; otherwise the colour is the kind, and the digits (or the
    last digit) are the microbatch. Lower case: not the rank's first stage.

    Args:
        width: columns of the terminal; None: no limit.
        coloured: with colours; otherwise plain text.
    """
    labels = [f"rank {rank:<{len(str(len(timeline.events) - 1))}} " for rank in range(len(timeline.events))]
    room = None if width is None else max(_LEAST_ROOM, width - len(labels[0]))
    columns = _columns(timeline, room, coloured=coloured)
    lines = []
    for begin in range(0, max(1, columns), room or max(1, columns)):
        shown = range(begin, columns if room is None else min(columns, begin + room))
        for rank, label in enumerate(labels):
            first = stages_of(timeline.placement, rank)[0]
            runs = _runs(timeline, rank, shown, columns)
            lines.append(label + "".join(_cell(event, size, first, coloured=coloured) for event, size in runs))
        lines.append("")
    return [*lines, *_legend(timeline, coloured=coloured)]


def _columns(timeline: Timeline, room: int | None, *, coloured: bool) -> int:
    """Number of columns of the timeline: the shortest action is as wide as its label, or as the room allows."""
    shortest = min((event.end - event.begin for event in _events(timeline) if event.end > event.begin), default=1.0)
    widest = max((len(_label(event.action)) for event in _events(timeline)), default=1)
    units = timeline.duration / shortest
    if room is None:
        return round(units * widest)
    # Plain cells need their label, coloured cells do not. With whole columns per unit, equal actions look equal.
    narrower = max(1, int(room / units)) if coloured else widest
    return min(round(units * min(widest, narrower)), room * _MOST_BLOCKS)


def _runs(timeline: Timeline, rank: int, part: range, columns: int) -> Iterator[tuple[Event | None, int]]:
    """Events of a rank (None where it is idle), each with its number of columns in this part."""
    events = iter(timeline.events[rank])
    event = next(events, None)
    shown: list[Event | None] = []
    for column in part:
        # A column shows what runs in the middle of its time.
        now = (column + 0.5) * timeline.duration / columns
        while event is not None and event.end <= now:
            event = next(events, None)
        shown.append(event if event is not None and event.begin <= now else None)
    for event, run in groupby(shown):
        yield event, len(list(run))


def _cell(event: Event | None, size: int, first: int, *, coloured: bool) -> str:
    if event is None:
        return _IDLE[coloured] * size
    action, later = event.action, event.action.stage != first
    label = _label(action).lower() if later else _label(action)
    number = str(action.microbatch)
    if not coloured:
        text = label if len(label) <= size else label[0]
        return f"{text:-<{size}}"
    text = next((word for word in (label, number) if len(word) <= size), number[-1])
    return f"\x1b[38;5;16;48;5;{_COLOURS[action.kind][later]}m{text:<{size}}{_OFF}"


def _legend(timeline: Timeline, *, coloured: bool) -> list[str]:
    kinds = [kind for kind in Kind if any(event.action.kind is kind for event in _events(timeline))]
    marks = [
        f"\x1b[38;5;16;48;5;{_COLOURS[kind][0]}m {kind} {_OFF} {WORDS[kind]}" if coloured else f"{kind} {WORDS[kind]}"
        for kind in kinds
    ]
    lines = ["  ".join(marks) if coloured else ", ".join(marks)]
    if len(timeline.placement) > len(timeline.events):
        lines.append(("darker and small letters" if coloured else "small letters") + ": not the rank's first stage")
    return lines


def _events(timeline: Timeline) -> list[Event]:
    return [event for row in timeline.events for event in row]


def _label(action: Action) -> str:
    return f"{action.kind}{action.microbatch}"
