"""A wish to stop, from Ctrl-C or a scheduler, that waits for the end of a step."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import TextIO

from titanlab.records.outcome import OutcomeKind

# What each signal asks for. Of several that the ranks have received the one with the largest number counts.
STOPS: Mapping[int, OutcomeKind] = {
    signal.SIGINT: OutcomeKind.CANCELLED,
    signal.SIGUSR2: OutcomeKind.PREEMPTED,
    signal.SIGTERM: OutcomeKind.PREEMPTED,
    signal.SIGXCPU: OutcomeKind.WALLTIME,
}
STOP_SIGNALS = tuple(STOPS)
ONE_WISH_SECONDS = 1.0
Handler = Callable[[int, FrameType | None], None]


class StopRequest:
    """Which signal asked this rank to stop, 0 while none did; and why, where somebody said so."""

    def __init__(self) -> None:
        self.signal = 0
        self.cause: str | None = None


def signal_for(kind: OutcomeKind) -> int:
    """The signal that asks for an end of this kind."""
    return {wanted: int(number) for number, wanted in STOPS.items() if number != signal.SIGTERM}[kind]


@contextlib.contextmanager
def handlers_kept(numbers: Iterable[int]) -> Iterator[None]:
    """Give signals back, at the end, the handlers that they had, whoever sets others in between."""
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextlib.contextmanager
def handled(numbers: Sequence[int], handler: Handler) -> Iterator[None]:
    """Let a handler have these signals, also where they were ignored; afterwards all is as it was.

    In the main thread only.
    """
    with handlers_kept(numbers):
        for number in numbers:
            signal.signal(number, handler)
        yield


@contextlib.contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Let the signals of STOPS set a flag instead of ending the process; another one, a second later, ends it.

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

    with handled(STOP_SIGNALS, handler):
        yield request


def stop_line(kind: OutcomeKind, cause: str) -> str:
    """What `told_request` understands."""
    return json.dumps({"signal": signal_for(kind), "cause": cause}) + "\n"


@contextlib.contextmanager
def told_request(lines: TextIO) -> Iterator[StopRequest]:
    """Let lines set the flag, for a rank whose job hears the signals in its place.

    Slurm sends a signal to every process of a job, and does not say what it means: the job's own process finds
    out, and all ranks are told the same. The end of the lines is the end of that process, and a wish too.
    """
    request = StopRequest()

    def read() -> None:
        for line in lines:
            with contextlib.suppress(ValueError):
                told = json.loads(line)
                request.cause, request.signal = told["cause"], told["signal"]
        if not request.signal:
            request.cause, request.signal = "the job's own process is gone; the run can be resumed", signal.SIGTERM

    threading.Thread(target=read, name="stop", daemon=True).start()
    yield request
