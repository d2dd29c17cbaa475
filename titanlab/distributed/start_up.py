"""`attempts/N/start_up.json`: the seconds from the launch of an attempt to the end of its first step, by phase."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from titanlab.distributed.ranks import PARENT
from titanlab.system import process_start, write_json

FILE = "start_up.json"
SCHEMA = 1
# The phases, in the order in which an attempt begins them.
PHASES = (
    *("launcher", "python", "recipe", "imports", "rendezvous"),
    *("model", "state", "data", "recorder", "first_step"),
)


class StartUp:
    """Measures the phases of an attempt from its launch to the end of its first step, on rank 0."""

    def __init__(self, begun: Mapping[str, float] | None = None, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._begun = list((begun or {}).items())
        self._show: Callable[[str | None], None] = lambda text: None
        self._ended = False

    def show_by(self, show: Callable[[str | None], None]) -> None:
        """Set the function that shows a phase's text; it gets None when the run's recorder takes over the terminal."""
        self._show = show

    def begin(self, phase: str, text: str | None = None) -> None:
        """Begin a phase, which ends the previous one. A phase may begin several times: its times are added up.

        Args:
            text: the action to show; None: show nothing.
        """
        assert phase in PHASES
        if not self._ended:
            self._begun.append((phase, self._clock()))
        self._show(text)

    def show_no_more(self) -> None:
        """Stop showing phases: the recorder takes over."""
        self._show(None)
        self._show = lambda text: None

    def begin_after(self, ended: float) -> None:
        """Count from the end of an earlier attempt; called if the same launcher made that attempt.

        Args:
            ended: seconds since the epoch, by the clock of that attempt's host; a future time counts as now.
        """
        ended = min(ended, self._clock())
        self._begun = [(phase, max(begun, ended)) for phase, begun in self._begun]

    def end(self) -> dict[str, float] | None:
        """End the last phase. Returns the seconds by phase, in order; None if this method was called before."""
        if self._ended:
            return None
        self._ended = True
        ends = [begun for _, begun in self._begun[1:]] + [self._clock()]
        seconds = dict.fromkeys((phase for phase in PHASES if phase in dict(self._begun)), 0.0)
        for (phase, begun), end in zip(self._begun, ends, strict=True):
            # The clock may have been set back meanwhile.
            seconds[phase] += max(0.0, end - begun)
        return seconds


def start_of_worker() -> StartUp:
    """The `StartUp` of an attempt, for the process that the launcher has started."""
    # Except on Linux, the start of Python itself is not counted.
    begun = {"python": process_start(os.getpid()) or time.time()}
    launched = process_start(int(os.environ[PARENT])) if PARENT in os.environ else None
    return StartUp({"launcher": launched, **begun} if launched else begun)


def write_start_up(folder: Path, seconds: Mapping[str, float]) -> None:
    """Write the record into the folder of an attempt."""
    rounded = {phase: round(value, 4) for phase, value in seconds.items()}
    write_json(folder / FILE, {"schema": SCHEMA, "seconds": rounded, "total": round(sum(seconds.values()), 4)})
