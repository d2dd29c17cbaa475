"""The watchdog ends a rank whose step does not end: all stacks in its log, a note of the cause, exit code 71.

The training loop reports its phase, which costs one assignment; a thread compares it with the clock. The note says
where the rank is in the code, and whether it waits for others. If native code holds the GIL and no thread can run, the
timer of faulthandler ends the process a little later: stacks, exit code 1, no note.
"""

import collections
import contextlib
import faulthandler
import os
import statistics
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import NamedTuple, NoReturn

from titanlab.records import (
    CodeLine,
    Collective,
    GroupRecord,
    HangRecord,
    Messages,
    Outcome,
    OutcomeKind,
    RankState,
)
from titanlab.system import trimmed

STEP_KEY = "training.step_timeout_seconds"
FIRST_STEP_KEY = "training.first_step_timeout_seconds"
# A step hangs if it takes at least this many times the usual time; a shorter one may only be slow.
_SLOW = 10
# The limit of a step if the config has none: the larger of this and _SLOW times the median step, once enough are known.
LEAST_LIMIT_SECONDS = 60.0
_FEWEST_STEPS = 3
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep
# Modules of titanlab and of torch that read or write files: a rank inside them waits for a disk, not for a rank.
_OWN_FILE_MODULES = (
    *("data/", "techniques/tracker/", "checkpoint/", "system/terminal.py", "system/files.py"),
    *("train/weights.py", "train/interchange.py", "train/starting_weights.py"),
    *("train/dcp.py", "train/initialise.py"),
    *("records/files.py", "records/run_folder.py", "records/claim.py", "records/outcome.py"),
)
_TORCH_FILE_MODULES = ("torch/distributed/checkpoint/", "torch/serialization.py")
# How long the CPU time of the main thread is measured.
BUSY_SECONDS = 0.5
_BUSY_SHARE = 0.1


class StepTimes:
    """Durations of the steps of an attempt, without the pauses between them."""

    def __init__(self) -> None:
        self._begin: float | None = None
        self._paused = 0.0
        self._first: float | None = None
        self._later: collections.deque[float] = collections.deque(maxlen=100)

    def step(self) -> None:
        """Note that a step begins and the step before it is complete."""
        now = time.monotonic()
        if self._begin is not None:
            seconds = now - self._begin - self._paused
            if self._first is None:
                # The first step includes compilation, so later steps are not compared with it.
                self._first = seconds
            else:
                self._later.append(seconds)
        self._begin, self._paused = now, 0.0

    def paused(self, seconds: float) -> None:
        """Subtract a pause from the duration of the current step."""
        self._paused += seconds

    def limit(self) -> float | None:
        """The limit of a step if the config has none, in seconds; None until three steps after the first are known."""
        if len(self._later) < _FEWEST_STEPS:
            return None
        return max(LEAST_LIMIT_SECONDS, _SLOW * statistics.median(self._later))

    def advice(self, key: str, limit: float | None) -> str:
        """A text with step times, and the setting to try if this step was only slow."""
        later = list(self._later)
        usual = statistics.median(later) if later else self._first
        if usual is None:
            times = "no step is complete yet"
        elif later:
            times = f"steps before it took {trimmed(usual)} s (median of {len(later)})"
        else:
            times = f"the one step before it took {trimmed(usual)} s"
        if limit is None:
            return times
        if usual is not None and later and limit >= _SLOW * usual:
            return f"{times}; {key}={limit:g}"
        enough = max(2 * limit, _SLOW * (usual or 0.0))
        # Rounded up to two digits.
        unit = 10.0 ** (len(str(int(enough))) - 2) if enough >= 10 else 1.0
        return f"{times}; if it was only slow, try {key}={-(-enough // unit) * unit:g}"


def hang(
    where: str,
    limit: float,
    frame: FrameType | None,
    *,
    rank: int = 0,
    attempt: int = 1,
    step: int = 0,
    busy: bool = False,
    since: float | None = None,
    advice: str = "",
) -> Outcome:
    """The outcome of a rank whose step, or other phase, did not end in time.

    It is a secondary failure (`echo`) if the rank waits for others: for a collective or its device, inside torch or in
    titanlab's code that calls torch. A rank that is anywhere else, or that computes, keeps the others waiting.

    Args:
        where: the phase, such as `step 3`.
        limit: seconds that the phase may take.
        since: seconds since the phase began, if another rank reached its limit first.
    """
    cause = f"{where} did not end within {limit:g} s"
    if since is not None:
        cause = f"{where} had not ended after {trimmed(since)} s, when another rank reached its limit"
    cause += f": rank {rank}"
    text, waits = None, False
    if frame is not None:
        text = "".join(["Traceback (most recent call last):\n", *traceback.format_stack(frame)])
        lines = stack_of(frame)
        # The caller of `queue.get` tells more than `queue.get`.
        line = next((line for line in lines if not is_standard(line.file)), lines[0])
        waits = not busy and _waits_for_others(line.file)
        # Show the last two parts of the path, also for titanlab's own files.
        cause += f" {'waits' if waits else 'computes' if busy else 'stands'} in {line}"
    return Outcome(
        kind=OutcomeKind.HANG,
        step=step,
        rank=rank,
        attempt=attempt,
        cause=f"{cause}; {advice}" if advice else cause,
        traceback=text,
        exit_code=OutcomeKind.HANG.exit_code,
        echo=waits,
    )


def main_thread_is_busy() -> bool:
    """Whether the main thread of this process computes, or waits for a core, during half a second.

    False if it cannot be measured.
    """
    begin = _main_thread_seconds()
    time.sleep(BUSY_SECONDS)
    end = _main_thread_seconds()
    return begin is not None and end is not None and end - begin >= _BUSY_SHARE * BUSY_SECONDS


def _main_thread_seconds() -> float | None:
    """Seconds in which the main thread has used a core or has waited for one; None if the system is not Linux."""
    task = Path(f"/proc/self/task/{os.getpid()}")
    try:
        # On a busy host a thread that computes may get less than a tenth of a core.
        running, waiting, *_ = map(int, (task / "schedstat").read_text().split())
        return (running + waiting) / 1e9
    except (OSError, ValueError):
        pass
    if not task.exists():
        return None
    # The kernel has no statistics of its scheduler.
    return time.clock_gettime(time.pthread_getcpuclockid(threading.main_thread().ident or 0))


def is_standard(file: str) -> bool:
    """Whether a source file is in Python's standard library."""
    if file.startswith("<frozen "):
        return True
    return file.startswith(_STANDARD_LIBRARY) and "-packages" + os.sep not in file


def _waits_for_others(file: str) -> bool:
    """Whether a source file computes or communicates: those of torch and titanlab, unless they read or write files."""
    if file.startswith(_PACKAGE):
        return not file.removeprefix(_PACKAGE).startswith(_OWN_FILE_MODULES)
    is_torch = f"{os.sep}torch{os.sep}" in file
    return is_torch and not any(f"{os.sep}{part}" in file for part in _TORCH_FILE_MODULES)


_FRAMES = 60


@dataclass(frozen=True, kw_only=True)
class Topology:
    """A rank's place among the others, as far as it is known so far.

    Attributes:
        coordinates: the rank's number on each axis whose degree is above 1.
        messages: returns the state of the pipeline's sends and receives; None without a pipeline.
        collectives: returns the last collectives of this process.
    """

    groups: Mapping[str, GroupRecord] = field(default_factory=dict)
    coordinates: Mapping[str, int] = field(default_factory=dict)
    messages: Callable[[], Messages | None] = lambda: None
    collectives: Callable[[], Sequence[Collective]] = tuple


def stack_of(frame: FrameType | None) -> list[CodeLine]:
    """The stack of a thread, innermost line first."""
    lines = []
    while frame is not None:
        lines.append(CodeLine(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return lines


def stack_of_error(trace: TracebackType | None) -> list[CodeLine]:
    """The stack of an exception, innermost line first."""
    lines = []
    while trace is not None:
        code = trace.tb_frame.f_code
        lines.append(CodeLine(code.co_filename, trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    return lines[::-1]


def hang_record(
    stack: Sequence[CodeLine],
    topology: Topology,
    *,
    rank: int,
    state: RankState,
    phase: str,
    step: int,
    seconds: float,
    limit: float | None,
) -> HangRecord:
    """The record of a rank whose main thread is at a stack; for the other arguments see `HangRecord`."""
    lines = [replace(line, file=line.file.replace(_PACKAGE, "titanlab/", 1)) for line in stack]
    ours_or_users = (line for line in lines if not is_standard(line.file) and f"{os.sep}torch{os.sep}" not in line.file)
    return HangRecord(
        rank=rank,
        time=time.time(),
        state=state,
        phase=phase,
        step=step,
        seconds=seconds,
        limit=limit,
        activity=_activity(stack),
        source=next(ours_or_users, None),
        stack=tuple(lines[:_FRAMES]),
        coordinates=topology.coordinates,
        groups=topology.groups,
        messages=topology.messages(),
        collectives=tuple(topology.collectives()),
    )


def _activity(stack: Iterable[CodeLine]) -> str:
    """`data` or `checkpoint` if the main thread is inside the data or a checkpoint, else an empty text."""
    for line in stack:
        if line.function == "next_batch" or line.file.startswith(_PACKAGE + "data" + os.sep):
            return "data"
        if line.file.startswith(_PACKAGE + "checkpoint" + os.sep):
            return "checkpoint"
    return ""


# Longest time between two checks; with short limits the thread checks more often.
_LOOK_SECONDS = 2.0
# With more than 512 ranks each rank checks less often, to spare the file server, but often enough for
# `hang.ANSWER_SECONDS`.
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
        note: called with the outcome of a rank that hangs, and with its record for the diagnosis (None: there is none),
            before the process ends.
        world: number of ranks that look for notes of others.
        is_asked: whether another rank hangs, so that this rank must write its note too.
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
        """The last complete step."""
        return self._phase.step

    def record_of_error(self, error: BaseException) -> HangRecord:
        """The record of a rank whose main thread has raised an error."""
        return self._record(stack_of_error(error.__traceback__), "raised", self._phase, limit=None)

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        faulthandler.cancel_dump_traceback_later()

    def _step_limit(self) -> tuple[float | None, str]:
        """The limit of the step that begins, and the config key of this limit."""
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
