"""The end of a rank whose step does not end: every thread's stack in its log, a note of why, exit code 71.

The loop says where it stands, which costs an assignment; a thread compares that with the clock. Where native code
keeps Python's lock and no thread can run, faulthandler's own timer ends the process a little later: stacks, exit
code 1, and no note.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple, NoReturn

from titanlab.outcome import Outcome, OutcomeKind

# How often the thread looks, at most; shorter limits are looked at more often.
_LOOK_SECONDS = 5.0
# Between the note and the exit: the others, who wait for this rank, write their own stacks meanwhile.
LINGER_SECONDS = 5.0
# How much later than the thread faulthandler's timer acts.
_NATIVE_MARGIN_SECONDS = 15.0
_PACKAGE = os.path.dirname(__file__)
# What faulthandler writes when its timer ends a process.
NATIVE_SIGN = "Timeout ("


class _Stand(NamedTuple):
    where: str
    step: int
    begin: float
    limit: float | None


class Watchdog:
    """Watches one rank from its making until `close`; the start counts as a first step.

    Args:
        step_seconds: limit of a step; None: none.
        first_seconds: of the start, the first step and pauses; None: none.
        note: takes the outcome of a rank that hangs, before the process ends.
        rank, attempt: for that outcome.
    """

    def __init__(
        self,
        *,
        step_seconds: float | None,
        first_seconds: float | None,
        note: Callable[[Outcome], None],
        rank: int = 0,
        attempt: int = 1,
    ) -> None:
        self._step_seconds, self._first_seconds = step_seconds, first_seconds
        self._note, self._rank, self._attempt = note, rank, attempt
        self._stepped = False
        self._stand = _Stand("the start", 0, time.monotonic(), first_seconds)
        self._closed = threading.Event()
        self._main = threading.main_thread().ident
        limits = [limit for limit in (step_seconds, first_seconds) if limit is not None]
        self._look_seconds = min([_LOOK_SECONDS, *(limit / 4 for limit in limits)])
        if limits:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def step(self, step: int) -> None:
        """A step begins; all before it are done."""
        limit = self._step_seconds if self._stepped else self._first_seconds
        self._stepped = True
        self._stand = _Stand(f"step {step}", step - 1, time.monotonic(), limit)

    @contextlib.contextmanager
    def pausing(self, what: str, step: int) -> Iterator[None]:
        """Inside, something is done between steps that may take longer than one."""
        before = self._stand
        self._stand = _Stand(f"{what} after step {step}", step, time.monotonic(), self._first_seconds)
        try:
            yield
        finally:
            self._stand = before._replace(begin=time.monotonic())

    def ending(self, step: int) -> None:
        """No step follows: what is left may take as long as a pause."""
        self._stand = _Stand(f"the end after step {step}", step, time.monotonic(), self._first_seconds)

    def close(self) -> None:
        """Watch no longer."""
        self._closed.set()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        while not self._closed.is_set():
            stand = self._stand
            left = None if stand.limit is None else stand.begin + stand.limit - time.monotonic()
            if left is None:
                faulthandler.cancel_dump_traceback_later()
            elif left <= 0:
                self._end(stand)
            else:
                # As long as this thread runs, the timer is put off before it acts.
                faulthandler.dump_traceback_later(left + _NATIVE_MARGIN_SECONDS, exit=True)
            self._closed.wait(self._look_seconds if left is None else min(self._look_seconds, left))
        faulthandler.cancel_dump_traceback_later()

    def _end(self, stand: _Stand) -> NoReturn:
        # Where writing the note hangs too, on a file system that is gone, the process still ends.
        faulthandler.dump_traceback_later(LINGER_SECONDS + _NATIVE_MARGIN_SECONDS, exit=True)
        frame = sys._current_frames().get(self._main or 0)
        outcome = hang(stand.where, stand.limit or 0.0, frame, rank=self._rank, attempt=self._attempt, step=stand.step)
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"{outcome.cause}. Stacks of all threads:\n")
            sys.stderr.flush()
        faulthandler.dump_traceback(file=2, all_threads=True)
        with contextlib.suppress(Exception):
            self._note(outcome)
        time.sleep(LINGER_SECONDS)
        os._exit(OutcomeKind.HANG.exit_code)


def hang(
    where: str, limit: float, frame: FrameType | None, *, rank: int = 0, attempt: int = 1, step: int = 0
) -> Outcome:
    """The outcome of a rank that did not come on.

    It is an echo where the rank waits for others: for a collective or its device, deep in torch or in our own code
    that calls it. A rank that stands elsewhere keeps them waiting.
    """
    cause = f"{where} did not end within {limit:g} s: rank {rank}"
    text, waits = None, False
    if frame is not None:
        text = "".join(["Traceback (most recent call last):\n", *traceback.format_stack(frame)])
        code = frame.f_code
        waits = _computes(code.co_filename)
        file = Path(code.co_filename)
        cause += (
            f" {'waits' if waits else 'stands'} in {code.co_name} ({file.parent.name}/{file.name}:{frame.f_lineno})"
        )
    return Outcome(
        kind=OutcomeKind.HANG,
        step=step,
        rank=rank,
        attempt=attempt,
        cause=cause,
        traceback=text,
        exit_code=OutcomeKind.HANG.exit_code,
        echo=waits,
    )


def _computes(file: str) -> bool:
    """Whether code computes or communicates: torch's does, and ours, but for what reads data."""
    if file.startswith(_PACKAGE + os.sep):
        return not file.startswith(os.path.join(_PACKAGE, "data") + os.sep)
    return f"{os.sep}torch{os.sep}" in file
