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
from collections.abc import Callable, Iterator
from typing import NamedTuple, NoReturn

from titanlab.distributed.hang import BUSY_SECONDS, FIRST_STEP_KEY, STEP_KEY, StepTimes, hang, main_thread_is_busy
from titanlab.records.outcome import Outcome, OutcomeKind

# How often the thread looks, at most; shorter limits are looked at more often.
_LOOK_SECONDS = 5.0
# Between the note and the exit: the others, who wait for this rank, write their own stacks meanwhile.
LINGER_SECONDS = 5.0
# How much later than the thread faulthandler's timer acts.
_NATIVE_MARGIN_SECONDS = 15.0
# What faulthandler writes when its timer ends a process.
NATIVE_SIGN = "Timeout ("


class _Stand(NamedTuple):
    where: str
    step: int
    begin: float
    limit: float | None
    key: str = FIRST_STEP_KEY


class Watchdog:
    """Watches one rank from its making until `close`; the start counts as a first step.

    Args:
        step_seconds: limit of a step; None: none.
        first_seconds: of the start, the first step and pauses; None: none.
        note: takes the outcome of a rank that hangs, before the process ends.
        rank, attempt: for that outcome.
        is_asked: whether another rank hangs, and wants to know where this one stands.
        idle_waits: whether a rank that waits for others leaves the processor idle: with a GPU it does not.
    """

    def __init__(
        self,
        *,
        step_seconds: float | None,
        first_seconds: float | None,
        note: Callable[[Outcome], None],
        rank: int = 0,
        attempt: int = 1,
        is_asked: Callable[[], bool] = lambda: False,
        idle_waits: bool = True,
    ) -> None:
        self._is_asked, self._idle_waits = is_asked, idle_waits
        self._times = StepTimes()
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
        limit, key = (self._step_seconds, STEP_KEY) if self._stepped else (self._first_seconds, FIRST_STEP_KEY)
        self._stepped = True
        self._times.step()
        self._stand = _Stand(f"step {step}", step - 1, time.monotonic(), limit, key)

    @contextlib.contextmanager
    def pausing(self, what: str, step: int) -> Iterator[None]:
        """Inside, something is done between steps that may take longer than one."""
        before, begin = self._stand, time.monotonic()
        self._stand = _Stand(f"{what} after step {step}", step, begin, self._first_seconds)
        try:
            yield
        finally:
            end = time.monotonic()
            self._times.paused(end - begin)
            self._stand = before._replace(begin=end)

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
            if self._is_asked():
                self._end(stand, since=time.monotonic() - stand.begin)
            if left is not None:
                # As long as this thread runs, the timer is put off before it acts.
                faulthandler.dump_traceback_later(left + _NATIVE_MARGIN_SECONDS, exit=True)
            self._closed.wait(self._look_seconds if left is None else min(self._look_seconds, left))
        faulthandler.cancel_dump_traceback_later()

    def _end(self, stand: _Stand, *, since: float | None = None) -> NoReturn:
        # Where writing the note hangs too, on a file system that is gone, the process still ends.
        faulthandler.dump_traceback_later(BUSY_SECONDS + LINGER_SECONDS + _NATIVE_MARGIN_SECONDS, exit=True)
        busy = self._idle_waits and main_thread_is_busy()
        outcome = hang(
            stand.where,
            stand.limit or 0.0,
            sys._current_frames().get(self._main or 0),
            rank=self._rank,
            attempt=self._attempt,
            step=stand.step,
            busy=busy,
            since=since,
            advice=self._times.advice(stand.key, None if since is not None else stand.limit),
        )
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"{outcome.cause}. Stacks of all threads:\n")
            sys.stderr.flush()
        faulthandler.dump_traceback(file=2, all_threads=True)
        with contextlib.suppress(Exception):
            self._note(outcome)
        time.sleep(LINGER_SECONDS)
        os._exit(OutcomeKind.HANG.exit_code)
