"""What a run does before its first step, with the seconds that it lasts; a thread redraws them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_TICK_SECONDS = 0.5
# Where nothing is redrawn, a phase that lasts so long gets a line of its own.
_SLOW_SECONDS = 30.0


class Phase:
    """The phase that lasts now, if there is one.

    Args:
        tick: called by a thread, about twice a second while a phase lasts.
        clock: monotonic time in seconds.
    """

    def __init__(self, tick: Callable[[], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._tick = tick
        self._clock = clock
        self._text: str | None = None
        self._begin = 0.0
        self._is_reported = False
        self._ended = threading.Event()
        # The one of the phase that lasts, and earlier ones that are about to end.
        self._threads: list[threading.Thread] = []

    def begin(self, text: str | None) -> None:
        """Begin a phase, which ends the one before; None: only end that."""
        self._text, self._begin, self._is_reported = text, self._clock(), False
        if text is None:
            self._ended.set()
        elif not self._threads or self._ended.is_set():
            self._ended = threading.Event()
            thread = threading.Thread(target=self._run, args=(self._ended,), name="terminal", daemon=True)
            thread.start()
            self._threads = [*(earlier for earlier in self._threads if earlier.is_alive()), thread]

    @property
    def line(self) -> str | None:
        """The phase with its seconds; None if there is none."""
        text, seconds = self._text, self._clock() - self._begin
        return None if text is None else f"{text} … {seconds:.0f} s" if seconds >= 1 else f"{text} …"

    def take_slow(self) -> str | None:
        """A line on a phase that lasts long, once for each; None: there is nothing to say."""
        if self._text is None or self._is_reported or self._clock() - self._begin < _SLOW_SECONDS:
            return None
        self._is_reported = True
        return self.line

    def close(self) -> None:
        """End the phase, and wait for its thread and for those of earlier phases."""
        self.begin(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._threads = []

    def _run(self, ended: threading.Event) -> None:
        while not ended.wait(_TICK_SECONDS):
            self._tick()
