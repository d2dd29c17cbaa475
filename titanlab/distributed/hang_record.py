"""What a rank that hangs writes for the diagnosis: where it is in the code, and its last collectives and messages."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any

from titanlab.distributed.hang import is_standard

_FRAMES = 60
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep


@dataclass(frozen=True, kw_only=True)
class Topology:
    """A rank's place among the others, as far as it is known yet.

    Attributes:
        groups: by torch's name of a process group, its axis and the ranks in it.
        coordinates: the rank's number on each axis whose degree is above 1.
        messages: returns the state of the pipeline's sends and receives; None without a pipeline.
        collectives: returns the last collectives of this process.
    """

    groups: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    coordinates: Mapping[str, int] = field(default_factory=dict)
    messages: Callable[[], Mapping[str, Any] | None] = lambda: None
    collectives: Callable[[], list[dict[str, Any]]] = list


@dataclass(frozen=True)
class Frame:
    """A line of a stack."""

    file: str
    line: int
    function: str


def stack_of(frame: FrameType | None) -> list[Frame]:
    """The stack of a thread, innermost frame first."""
    frames = []
    while frame is not None:
        frames.append(Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return frames


def stack_of_error(trace: TracebackType | None) -> list[Frame]:
    """The stack of an exception, innermost frame first."""
    frames = []
    while trace is not None:
        code = trace.tb_frame.f_code
        frames.append(Frame(code.co_filename, trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    return frames[::-1]


def hang_record(
    frames: list[Frame],
    topology: Topology,
    *,
    rank: int,
    state: str,
    phase: str,
    step: int,
    seconds: float,
    limit: float | None,
) -> dict[str, Any]:
    """The content of `attempts/N/hang/rank-R.json`.

    Args:
        frames: of the main thread, innermost first.
        state: `waits` for other ranks or its device, `computes`, `stands` elsewhere, or `raised`.
        phase: such as `step 3`.
        step: last complete step.
        seconds: since the phase began.
        limit: of the phase; None: another rank reached its limit first, or there is none.
    """
    source = next(filter(_is_ours_or_users, frames), None)
    return {
        "rank": rank,
        "time": time.time(),
        "state": state,
        "phase": phase,
        "step": step,
        "seconds": seconds,
        "limit": limit,
        "activity": _activity(frames),
        "source": None if source is None else _values(source),
        "stack": [_values(frame) for frame in frames[:_FRAMES]],
        "coordinates": dict(topology.coordinates),
        "groups": {name: {"axis": axis, "ranks": list(ranks)} for name, (axis, ranks) in topology.groups.items()},
        "messages": topology.messages(),
        "collectives": topology.collectives(),
    }


def _activity(frames: Iterable[Frame]) -> str:
    """`data` or `checkpoint` if the main thread is inside the data or a checkpoint, else an empty text."""
    for frame in frames:
        if frame.function == "next_batch" or frame.file.startswith(_PACKAGE + "data" + os.sep):
            return "data"
        if frame.file.startswith(_PACKAGE + "checkpoint" + os.sep):
            return "checkpoint"
    return ""


def _is_ours_or_users(frame: Frame) -> bool:
    return not is_standard(frame.file) and f"{os.sep}torch{os.sep}" not in frame.file


def _values(frame: Frame) -> dict[str, Any]:
    file = frame.file
    if file.startswith(_PACKAGE):
        file = os.path.join("titanlab", file.removeprefix(_PACKAGE))
    return {"file": file, "line": frame.line, "function": frame.function}
