"""The watchdog ends a rank whose step does not end: all stacks in its log, a note of the cause, exit code 71.

The training loop reports its phase, which costs one assignment; a thread compares it with the clock. If native code
holds the GIL and no thread can run, the timer of faulthandler ends the process a little later: stacks, exit code 1,
no note.
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

from titanlab.distributed.hang import (
    BUSY_SECONDS,
    FIRST_STEP_KEY,
    STEP_KEY,
    StepTimes,
    Topology,
    hang,
    hang_record,
    main_thread_is_busy,
    stack_of,
    stack_of_error,
)
from titanlab.records import CodeLine, HangRecord, Outcome, OutcomeKind, RankState

# Longest time between two checks; with short limits the thread checks more often.
_LOOK_SECONDS = 2.0
# With more than 512 ranks each rank checks less often, to spare the file server, but often enough for
# `silence.ANSWER_SECONDS`.
_LOOKS_A_SECOND = 128
_MOST_LOOK_SECONDS = 5.0
# Between the note and the exit: the other ranks, which wait for this one, write their own stacks meanwhile.
LINGER_SECONDS = 5.0
# How much later than the thread the timer of faulthandler acts.
_NATIVE_MARGIN_SECONDS = 15.0
# The text that faulthandler writes when its timer ends a process.
NATIVE_SIGN = "Timeout ("


class _Phase(NamedTuple):
    where: str
    step: int
    begin: float
    limit: float | None
    key: str = FIRST_STEP_KEY


class Watchdog:
    """Watches one rank until `close`; the start of the process counts as a first step.

    Args:
        step_seconds: limit of a step; 0: no limit; None: `StepTimes.limit`, and `first_seconds` until it is known.
        first_seconds: limit of the start, of the first step and of pauses; None: no limit.
        note: is called with the outcome of a rank that hangs, and with its record for the diagnosis (None: there is
            none), before the process ends.
        rank, attempt: for that outcome.
        world: number of ranks that look for notes of others.
        is_asked: whether another rank hangs, so that this rank has to write its note too.
        idle_waits: whether a rank that waits for others leaves its CPU core idle; with a GPU it polls.
    """

    def __init__(
        self,
        *,
        step_seconds: float | None,
        first_seconds: float | None,
        note: Callable[[Outcome, HangRecord | None], None],
        rank: int = 0,
        attempt: int = 1,
        world: int = 1,
        is_asked: Callable[[], bool] = lambda: False,
        idle_waits: bool = True,
    ) -> None:
        self._is_asked, self._idle_waits = is_asked, idle_waits
        self._times = StepTimes()
        self._step_seconds, self._first_seconds = step_seconds, first_seconds
        self._note, self._rank, self._attempt = note, rank, attempt
        self._stepped = False
        self._topology = Topology()
        self._phase = _Phase("the start", 0, time.monotonic(), first_seconds)
        self._closed = threading.Event()
        self._main = threading.main_thread().ident
        limits = [limit for limit in (step_seconds, first_seconds) if limit]
        usual = min(_MOST_LOOK_SECONDS, max(_LOOK_SECONDS, world / _LOOKS_A_SECOND))
        self._look_seconds = min([usual, *(limit / 4 for limit in limits)])
        if limits or step_seconds is None:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def learn(self, topology: Topology) -> None:
        """Take the rank's place among the others, for its record."""
        self._topology = topology

    def step(self, step: int) -> None:
        """Note that a step begins; all steps before it are complete."""
        self._times.step()
        limit, key = self._step_limit()
        self._stepped = True
        self._phase = _Phase(f"step {step}", step - 1, time.monotonic(), limit, key)

    @contextlib.contextmanager
    def pausing(self, what: str, step: int) -> Iterator[None]:
        """Inside the block, work between steps may take longer than a step."""
        before, begin = self._phase, time.monotonic()
        self._phase = _Phase(f"{what} after step {step}", step, begin, self._first_seconds)
        try:
            yield
        finally:
            end = time.monotonic()
            self._times.paused(end - begin)
            self._phase = before._replace(begin=end)

    def ending(self, step: int) -> None:
        """Note that no step follows; the rest may take as long as a pause."""
        self._phase = _Phase(f"the end after step {step}", step, time.monotonic(), self._first_seconds)

    @property
    def done(self) -> int:
        """The last step that is complete."""
        return self._phase.step

    def record_of_error(self, error: BaseException) -> HangRecord:
        """The record of a rank whose main thread has raised an error."""
        return self._record(stack_of_error(error.__traceback__), "raised", self._phase, limit=None)

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        faulthandler.cancel_dump_traceback_later()

    def _step_limit(self) -> tuple[float | None, str]:
        """The limit of the step that begins, and the key of the config that it comes from."""
        if not self._stepped:
            return self._first_seconds, FIRST_STEP_KEY
        if self._step_seconds is not None:
            return self._step_seconds or None, STEP_KEY
        limit = self._times.limit()
        return (self._first_seconds, FIRST_STEP_KEY) if limit is None else (limit, STEP_KEY)

    def _watch(self) -> None:
        while not self._closed.is_set():
            phase = self._phase
            left = None if phase.limit is None else phase.begin + phase.limit - time.monotonic()
            if left is None:
                faulthandler.cancel_dump_traceback_later()
            elif left <= 0:
                self._end(phase)
            if self._is_asked():
                self._end(phase, since=time.monotonic() - phase.begin)
            if left is not None:
                # As long as this thread can run, it restarts the timer before the timer acts.
                faulthandler.dump_traceback_later(left + _NATIVE_MARGIN_SECONDS, exit=True)
            self._closed.wait(self._look_seconds if left is None else min(self._look_seconds, left))
        faulthandler.cancel_dump_traceback_later()

    def _end(self, phase: _Phase, *, since: float | None = None) -> NoReturn:
        # The process ends even if writing the note hangs, on a file system that does not respond.
        faulthandler.dump_traceback_later(BUSY_SECONDS + LINGER_SECONDS + _NATIVE_MARGIN_SECONDS, exit=True)
        busy = self._idle_waits and main_thread_is_busy()
        frame = sys._current_frames().get(self._main or 0)
        outcome = hang(
            phase.where,
            phase.limit or 0.0,
            frame,
            rank=self._rank,
            attempt=self._attempt,
            step=phase.step,
            busy=busy,
            since=since,
            advice=self._times.advice(phase.key, None if since is not None else phase.limit),
        )
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"{outcome.cause}. Stacks of all threads:\n")
            sys.stderr.flush()
        faulthandler.dump_traceback(file=2, all_threads=True)
        state: RankState = "computes" if busy else "waits" if outcome.echo else "stands"
        record = None
        with contextlib.suppress(Exception):
            record = self._record(stack_of(frame), state, phase, limit=None if since is not None else phase.limit)
        with contextlib.suppress(Exception):
            self._note(outcome, record)
        time.sleep(LINGER_SECONDS)
        os._exit(OutcomeKind.HANG.exit_code)

    def _record(self, stack: list[CodeLine], state: RankState, phase: _Phase, *, limit: float | None) -> HangRecord:
        return hang_record(
            stack,
            self._topology,
            rank=self._rank,
            state=state,
            phase=phase.where,
            step=phase.step,
            seconds=time.monotonic() - phase.begin,
            limit=limit,
        )
