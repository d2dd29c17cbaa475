"""A wish to stop, from Ctrl-C or a scheduler, that waits for the end of a step."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Which signal asked this rank to stop; 0 while none did."""

    def __init__(self) -> None:
        self.signal = 0


@contextlib.contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Let SIGINT and SIGTERM set a flag instead of ending the process; a second one of them ends it.

    Outside the main thread signals cannot be caught, and the flag stays down.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def handler(number: int, frame: FrameType | None) -> None:
        if request.signal:
            raise KeyboardInterrupt
        request.signal = number

    before = {number: signal.signal(number, handler) for number in STOP_SIGNALS}
    try:
        yield request
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
