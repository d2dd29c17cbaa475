"""Timelines as text, one row for each rank, and as a figure, one panel for each schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from titanlab.errors import ConfigError
from titanlab.techniques.schedule.action import Action, Event, Kind, Timeline
from titanlab.techniques.schedule.contract import stages_of

WORDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "gradient of input",
    Kind.WEIGHT: "gradient of weights",
}
# Background colours, of the terminal's 256: for a rank's first stage, and for its later stages.
_TERMINAL_COLOURS = {
    Kind.FORWARD: (117, 68),
    Kind.BACKWARD: (157, 71),
    Kind.INPUT: (123, 37),
    Kind.WEIGHT: (222, 172),
}
_OFF = "\x1b[0m"
_LEAST_ROOM = 10
_MOST_BLOCKS = 20  # blocks of rows below each other; longer timelines get more time per column


def rows(timeline: Timeline, *, width: int | None, coloured: bool) -> list[str]:
    """The lines of a timeline, wrapped into blocks of rows if it is too long, with a legend below.

    A cell has kind and microbatch if there is room for both; otherwise the colour is the kind, and the digits (or the
    last digit) are the microbatch. Text in lower case: an action of the rank's later stages.

    Args:
        width: columns of the terminal; None: no limit.
    """
    labels = [f"rank {rank:<{len(str(len(timeline.events) - 1))}} " for rank in range(len(timeline.events))]
    # The shortest action is as wide as its label, or as the room allows.
    columns = widest = max((len(_label(event.action)) for row in timeline.events for event in row), default=1)
    units = _cells(timeline)
    if width is None:
        room = columns = max(1, round(units * widest))
    else:
        room = max(_LEAST_ROOM, width - len(labels[0]))
        # Plain cells need their label, coloured cells do not. With whole columns per unit, equal actions look equal.
        narrower = max(1, int(room / units)) if coloured else widest
        columns = min(round(units * min(widest, narrower)), room * _MOST_BLOCKS)
    lines = []
    for begin in range(0, max(1, columns), room):
        part = range(begin, min(columns, begin + room)) if units else range(0)
        for rank, label in enumerate(labels):
            first = stages_of(timeline.placement, rank)[0]
            cells = _runs(timeline, rank, part, columns)
            lines.append(label + "".join(_cell(event, size, first, coloured=coloured) for event, size in cells))
        lines.append("")
    kinds = _kinds([timeline])
    if coloured:
        marks = (f"\x1b[38;5;16;48;5;{_TERMINAL_COLOURS[kind][0]}m {kind} {_OFF} {WORDS[kind]}" for kind in kinds)
        lines.append("  ".join(marks))
    else:
        lines.append(", ".join(f"{kind} {WORDS[kind]}" for kind in kinds))
    if len(timeline.placement) > len(timeline.events):
        lines.append(("darker and small letters" if coloured else "small letters") + ": not the rank's first stage")
    return lines


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
        return (" " if coloured else ".") * size
    action, later = event.action, event.action.stage != first
    label = _label(action).lower() if later else _label(action)
    if not coloured:
        text = label if len(label) <= size else label[0]
        return f"{text:-<{size}}"
    number = str(action.microbatch)
    text = next((word for word in (label, number) if len(word) <= size), number[-1])
    return f"\x1b[38;5;16;48;5;{_TERMINAL_COLOURS[action.kind][later]}m{text:<{size}}{_OFF}"


ENDINGS = (".png", ".svg", ".pdf")
LIMIT = 10_000  # cells; drawing more takes a minute

# Colours of a rank's first and last stage; those between are interpolated. Colour-blind readers can distinguish them.
_COLOURS = {
    Kind.FORWARD: ("#a9cdee", "#4a90d0"),
    Kind.BACKWARD: ("#b5dfae", "#57a84f"),
    Kind.INPUT: ("#c9bfe6", "#8d75c4"),
    Kind.WEIGHT: ("#fbd59a", "#ea9a2e"),
}
_IDLE = "#f1f1ef"
_CELL_INK = "#111111"
_ROW_INCHES, _PANEL_INCHES, _FRAME_INCHES = 0.34, 0.75, 0.7
_LABEL_INCHES, _LEAST_INCHES, _MOST_INCHES = 1.6, 8.0, 40.0
_LEAST_POINTS = 4.5  # smaller digits cannot be read, so such cells have no text


def draw(panels: Sequence[tuple[str, Timeline]], path: Path) -> None:
    """Write a figure of timelines.

    Raises:
        ConfigError: unknown ending, a path that cannot be written, too many actions, or matplotlib is not installed.
    """
    actions = sum(len(events) for _, timeline in panels for events in timeline.events)
    if actions > LIMIT:
        raise ConfigError("--plot", path, f"would have {actions} cells, and {LIMIT} can be seen", "try fewer --ranks")
    if path.suffix.lower() not in ENDINGS:
        raise ConfigError("--plot", path, "is drawn as PNG, SVG or PDF", f"try {path.with_suffix('.svg')}")
    if not path.absolute().parent.is_dir():
        raise ConfigError("--plot", path, "there is no such folder", "make it, or name another")
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        rule = "needs matplotlib, which is not installed"
        raise ConfigError("--plot", path, rule, "pip install matplotlib, or leave --plot out") from error
    longest = max(timeline.duration for _, timeline in panels)
    size = figure_size([timeline for _, timeline in panels])
    # A fixed salt, and no date below, so that the same figure gives the same file.
    with mpl.rc_context({"svg.hashsalt": "titanlab", "font.family": "DejaVu Sans", "pdf.fonttype": 42}):
        figure = Figure(figsize=size, layout="constrained")
        heights = [len(timeline.events) for _, timeline in panels]
        axes = figure.subplots(len(panels), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
        for axis, (title, timeline) in zip(axes, panels, strict=True):
            draw_panel(axis, title, timeline, longest=longest, width=size[0])
        axes[-1].set_xlabel("time, in units of the durations given", fontsize=9, color="#444444")
        draw_legend(figure, [timeline for _, timeline in panels])
        try:
            figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
        except OSError as error:
            raise ConfigError("--plot", path, f"cannot be written: {error.strerror}", "name another file") from error


def figure_size(timelines: Sequence[Timeline]) -> tuple[float, float]:
    rows = sum(len(timeline.events) for timeline in timelines)
    longest_row = max(_cells(timeline) for timeline in timelines)
    return (
        min(_MOST_INCHES, max(_LEAST_INCHES, _LABEL_INCHES + 0.24 * longest_row)),
        rows * _ROW_INCHES + len(timelines) * _PANEL_INCHES + _FRAME_INCHES,
    )


def _cells(timeline: Timeline) -> float:
    """The timeline's duration in units of its shortest action."""
    lengths = (event.end - event.begin for row in timeline.events for event in row if event.end > event.begin)
    return timeline.duration / min(lengths, default=1.0)


def _kinds(timelines: Sequence[Timeline]) -> list[Kind]:
    found = {event.action.kind for timeline in timelines for row in timeline.events for event in row}
    return [kind for kind in Kind if kind in found]


def _label(action: Action) -> str:
    return f"{action.kind}{action.microbatch}"


def draw_panel(axis: Any, title: str, timeline: Timeline, *, longest: float, width: float) -> list[Any]:
    """Draw one timeline into a figure of `width` inches. Returns the boxes behind the rows, one for each rank."""
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.patches import Rectangle

    labels = _labels(timeline, (width - _LABEL_INCHES) / longest)
    colours = {kind: LinearSegmentedColormap.from_list(kind, ends) for kind, ends in _COLOURS.items()}
    boxes = []
    for rank, events in enumerate(timeline.events):
        stages = stages_of(timeline.placement, rank)
        idle = Rectangle((0, rank - 0.4), timeline.duration, 0.8, facecolor=_IDLE, linewidth=0)
        boxes.append(axis.add_patch(idle))
        for (stage, kind, microbatch), begin, end in events:
            shade = stages.index(stage) / max(1, len(stages) - 1)
            box = Rectangle((begin, rank - 0.4), end - begin, 0.8, linewidth=0.6, edgecolor="white")
            box.set_facecolor(colours[kind](shade))
            axis.add_patch(box)
            form, points = labels[kind]
            if points >= _LEAST_POINTS:
                text = form.format(kind=kind, microbatch=microbatch)
                middle = (begin + end) / 2
                axis.text(middle, rank, text, fontsize=points, color=_CELL_INK, ha="center", va="center_baseline")
    axis.set_xlim(0, longest)
    axis.set_ylim(len(timeline.events) - 0.5, -0.5)
    peaks = [f"{peak:.3g}" for peak in timeline.peak_in_flight]
    axis.set_yticks(range(len(peaks)), [f"rank {rank} (keeps {peak})" for rank, peak in enumerate(peaks)])
    axis.tick_params(labelsize=8, length=0, colors="#444444")
    axis.set_title(title, fontsize=10.5, loc="left")
    for side in ("top", "right", "left", "bottom"):
        axis.spines[side].set_visible(False)
    return boxes


def draw_legend(figure: Any, timelines: Sequence[Timeline]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=_COLOURS[kind][0], label=f"{kind}: {WORDS[kind]}") for kind in _kinds(timelines)]
    handles.append(Patch(facecolor=_IDLE, label="idle"))
    if any(len(timeline.placement) > len(timeline.events) for timeline in timelines):
        handles.append(Patch(facecolor="none", label="darker: the rank's later stages"))
    handles.append(Patch(facecolor="none", label="keeps: most microbatches in flight"))
    figure.legend(handles=handles, loc="outside lower left", ncols=len(handles), fontsize=8.5, frameon=False)


def _labels(timeline: Timeline, inches: float) -> dict[Kind, tuple[str, float]]:
    """Text of each kind's cells, and the font size at which the longest text fits into the narrowest cell."""
    events = [event for row in timeline.events for event in row]
    longest = max((len(str(event.action.microbatch)) for event in events), default=1)
    labels = {}
    for kind in Kind:
        width = inches * min((event.end - event.begin for event in events if event.action.kind is kind), default=1.0)
        # A digit's width is about 0.64 of the font size.
        whole, number = (min(8.0, 72 * width * 0.9 / (0.64 * letters)) for letters in (1 + longest, longest))
        labels[kind] = ("{kind}{microbatch}", whole) if whole >= _LEAST_POINTS else ("{microbatch}", number)
    return labels
