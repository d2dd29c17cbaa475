"""A request to stop, by Ctrl-C or a scheduler, which takes effect at the end of a step.

A rank gets the request only as a signal from the process that has started the rank: a launcher forwards the signals
that it gets. A scheduler signals all processes of a job at once, and does not say why. Workers of a job therefore
ignore its signals; the process that has started a worker finds out why, writes it into the attempt's folder
(`write_stop`), and sends the worker SIGHUP.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

from titanlab.distributed.ranks import PARENT
from titanlab.errors import TitanlabError
from titanlab.records import Outcome, OutcomeKind, StopReason
from titanlab.system import parse_json, read_text

# The kind of outcome by signal. If the ranks have received several signals, the one with the largest number counts.
STOPS: Mapping[int, OutcomeKind] = {
    signal.SIGINT: OutcomeKind.CANCELLED,
    signal.SIGUSR2: OutcomeKind.PREEMPTED,
    signal.SIGTERM: OutcomeKind.PREEMPTED,
    signal.SIGXCPU: OutcomeKind.WALLTIME,
}
STOP_SIGNALS = tuple(STOPS)
STOP_FILE = "stop.json"
ONE_REQUEST_SECONDS = 1.0  # signals within this time count as one request
_LAUNCHER_LOOK_SECONDS = 1.0
_LAUNCHER_GONE = "its launcher is gone; the run can be resumed"
Handler = Callable[[int, FrameType | None], None]


def write_stop(attempt: Path, reason: StopReason) -> StopReason:
    """Write the reason to stop to an attempt's folder, unless there is one already. Returns the reason that counts."""
    text = json.dumps({"schema": 1, "kind": reason.kind.value, "cause": reason.cause, "time": time.time()})
    # A reader that sees an incomplete file ignores it and reads it again later.
    with contextlib.suppress(FileExistsError), (attempt / STOP_FILE).open("x", encoding="utf-8") as file:
        file.write(text)
    return read_stop(attempt) or reason


def read_stop(attempt: Path) -> StopReason | None:
    """The reason to stop in an attempt's folder; None if there is none."""
    try:
        value = parse_json(read_text(attempt / STOP_FILE))
        return StopReason(kind=OutcomeKind(value["kind"]), cause=str(value["cause"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


class StopRequest:
    """A request to stop: `signal`, 0 while there is no request, and its cause if that is known.

    Attributes:
        ends_at_once: whether a request ends the rank at once, see `at_once`.
    """

    def __init__(self) -> None:
        self.signal = 0
        self.cause: str | None = None
        self.ends_at_once = self._is_due = False
        self._patience = 0.0

    @contextlib.contextmanager
    def at_once(self, *, active: bool, patience_seconds: float = 0.0) -> Iterator[None]:
        """Inside the block, a request raises StoppedEarly in the main thread, because nothing would be lost.

        Args:
            active: whether a request raises; if not, it takes effect later, even if an outer block is active.
            patience_seconds: how long to wait before raising: the launcher asks a rank to end when another rank fails,
                and both may fail for the same reason. Then this rank's own error comes first.
        """
        self.ends_at_once, self._patience = active, patience_seconds

        def wake(number: int, frame: FrameType | None) -> None:
            if self.ends_at_once and self._is_due:
                self._is_due = False
                raise StoppedEarly

        try:
            if active and self.signal:
                raise StoppedEarly
            with handled_signals((signal.SIGCONT,) if active and _in_main_thread() else (), wake):
                yield
        finally:
            self.ends_at_once = False

    def cause_of(self, number: int) -> str | None:
        """The cause, if known, of a signal that this rank or another rank has received.

        Call this when the run ends, not at the signal: another rank may have received the signal before the cause is
        visible to this rank, such as the death of its launcher.
        """
        cause = self.cause if self.signal == number else None
        return cause or _cause(number)

    def note(self, number: int, cause: str | None) -> None:
        """Set the signal and its cause; any thread may call this."""
        self.cause, self.signal = cause, number
        if self.ends_at_once and self._patience:
            timer = threading.Timer(self._patience, self._wake_main_thread)
            timer.daemon = True
            timer.start()
        elif self.ends_at_once:
            self._wake_main_thread()

    def _wake_main_thread(self) -> None:
        """Send SIGCONT, whose handler raises: only a signal interrupts a system call, such as a wait for a compiler."""
        self._is_due = True
        if self.ends_at_once:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGCONT)


class Impatient(TitanlabError):
    """A second Ctrl-C, before the end of the run was recorded."""

    exit_code = OutcomeKind.CANCELLED.exit_code

    def __init__(self) -> None:
        super().__init__("interrupted again before the end of the run was recorded; it can be resumed")


class StoppedEarly(BaseException):
    """The run was asked to stop before its first step was done. Not an Exception: torch would wrap it. The message
    says what the run was doing, as the end of a sentence after "asked to end".
    """


def stopped_early(request: StopRequest, *, rank: int, attempt: int, when: str = "") -> Outcome:
    """The outcome of a rank that was asked to stop before its first step was done.

    After SIGTERM it is a secondary failure: when a rank fails, the launcher sends SIGTERM to the other ranks.

    Args:
        when: what the rank was doing, such as `when rank 1 had not come`; empty: nothing that the user must know.
    """
    when = when or "before its first step was done"
    outcome = _stopped(request.signal, request.cause_of(request.signal), when, rank, attempt)
    return replace(outcome, echo=request.signal == signal.SIGTERM and request.cause is None)


def stopped_before_start(number: int, *, attempt: int) -> Outcome:
    """The outcome of an attempt whose launcher received a stop signal before it had started ranks."""
    meant = signal.SIGINT if number == signal.SIGHUP else number
    return _stopped(meant, _cause(number), "before its ranks were started", None, attempt)


def _stopped(number: int, cause: str | None, when: str, rank: int | None, attempt: int) -> Outcome:
    kind = STOPS[number]
    cause = cause or f"asked to end by {signal.Signals(number).name}; the run can be resumed"
    return Outcome(kind=kind, rank=rank, attempt=attempt, cause=f"{cause} ({when})", exit_code=kind.exit_code)


def _cause(number: int) -> str | None:
    """The cause of a signal to this process; None: not known."""
    if number == signal.SIGHUP:
        return "its terminal was closed (SIGHUP); the run can be resumed"
    return _LAUNCHER_GONE if number == signal.SIGTERM and _launcher_is_gone() else None


def _launcher_is_gone() -> bool:
    parent = os.environ.get(PARENT)
    return parent is not None and os.getppid() != int(parent)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def caught_signals() -> tuple[int, ...]:
    """The signals that ask a run to stop; SIGHUP (a closed terminal) only if it is not ignored (`nohup`)."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return STOP_SIGNALS if ignored else (*STOP_SIGNALS, signal.SIGHUP)


@contextlib.contextmanager
def handled_signals(numbers: Sequence[int], handler: Handler) -> Iterator[None]:
    """Handle these signals inside the block, even if they were ignored before; then restore their handlers.

    Main thread only.
    """
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        for number in numbers:
            signal.signal(number, handler)
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextlib.contextmanager
def held_signals(
    numbers: Sequence[int] | None = None, *, is_impatient: bool = True
) -> Iterator[list[tuple[int, float]]]:
    """Inside the block, stop signals do not end the process: the list has each signal with its time, in order.

    Main thread only.

    Args:
        numbers: signals; None: the signals of `caught_signals`.
        is_impatient: whether a Ctrl-C over a second after the first signal raises Impatient, because the block may wait
            for a lost file server.
    """
    held: list[tuple[int, float]] = []

    def handler(number: int, frame: FrameType | None) -> None:
        held.append((number, time.monotonic()))
        if is_impatient and number == signal.SIGINT and held[-1][1] - held[0][1] > ONE_REQUEST_SECONDS:
            raise Impatient

    with handled_signals(caught_signals() if numbers is None else numbers, handler):
        yield held


@contextlib.contextmanager
def stop_request(reason: Callable[[], StopReason | None] = lambda: None) -> Iterator[StopRequest]:
    """Let the signals of STOPS set a flag and not end the process; one over a second later raises KeyboardInterrupt.

    In a worker of a job only SIGHUP counts: the worker ignores SIGTERM since its start. The death of the launcher is a
    request too.

    One request may arrive as several signals at once, such as from a terminal and from a launcher.

    Python handles signals in the main thread only: if another thread calls this, the flag is never set.

    Args:
        reason: called at SIGHUP; returns the reason that the parent process has written.
    """
    request = StopRequest()
    first = 0.0
    closed = threading.Event()
    if not _in_main_thread():
        yield request
        return

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal first
        if first:
            if time.monotonic() - first > ONE_REQUEST_SECONDS:
                raise KeyboardInterrupt
            return
        first = time.monotonic()
        if request.signal:
            return
        told = reason() if number == signal.SIGHUP else None
        if told is not None:
            # Note the first signal of this kind in STOPS: for a preemption SIGUSR2, which only a scheduler sends.
            request.note(next(stop for stop, kind in STOPS.items() if kind is told.kind), told.cause)
        else:
            # SIGHUP (a closed terminal) counts as Ctrl-C: the ranks add up one flag for each signal of STOPS only.
            request.note(signal.SIGINT if number == signal.SIGHUP else number, _cause(number))

    def watch_launcher() -> None:
        while not closed.wait(_LAUNCHER_LOOK_SECONDS):
            if _launcher_is_gone():
                if not request.signal:
                    request.note(signal.SIGTERM, _LAUNCHER_GONE)
                return

    in_a_job = signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    with handled_signals((signal.SIGHUP,) if in_a_job else caught_signals(), handler):
        if PARENT in os.environ:
            threading.Thread(target=watch_launcher, name="launcher", daemon=True).start()
        try:
            yield request
        finally:
            closed.set()
