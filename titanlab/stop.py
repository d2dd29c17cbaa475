"""A wish to stop, from Ctrl-C or a scheduler, that waits for the end of a step."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
ONE_WISH_SECONDS = 1.0


class StopRequest:
    """Which signal asked this rank to stop; 0 while none did."""

    def __init__(self) -> None:
        self.signal = 0


@contextlib.contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Let SIGINT and SIGTERM set a flag instead of ending the process; another one, a second later, ends it.

    One wish may arrive several times at once: from a terminal and from a launcher, or from the kernel, which
    tells of a dead parent once for each of its threads.

    Outside the main thread signals cannot be caught, and the flag stays down.
    """
    request = StopRequest()
    first = 0.0
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal first
        if not request.signal:
            request.signal, first = number, time.monotonic()
        elif time.monotonic() - first > ONE_WISH_SECONDS:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, handler) for number in STOP_SIGNALS}
    try:
        yield request
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
