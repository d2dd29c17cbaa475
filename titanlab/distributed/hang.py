"""What happens when a rank hangs: how its process ends, what it writes, and the verdict over all ranks.

If a step does not end, the watchdog of a rank writes all stacks to its log, a note of the cause and a record for the
diagnosis, and ends the rank with exit code 71. It does the same as soon as another rank has left such a note. If a rank
writes no note, the process that started the rank writes the note; it runs on the same host. In this module, `since` is
when the ranks were started, in seconds since the epoch: older notes belong to earlier attempts.
"""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import itertools
import math
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn

from titanlab.errors import ConfigError
from titanlab.records import (
    CodeLine,
    Diagnosis,
    HangRecord,
    Outcome,
    OutcomeKind,
    RankState,
    RunFolder,
    diagnose,
    different_calls,
    first_cause,
    is_silent,
    odd_calls,
    rank_rows,
    read_hang,
)
from titanlab.system import STOPPED, process_state, trimmed

STEP_KEY = "training.step_timeout_seconds"
FIRST_STEP_KEY = "training.first_step_timeout_seconds"
# A step hangs if it takes at least this many times the usual time; a shorter step may only be slow.
_SLOW = 10
# Without a limit in the config, a step may take this long, or _SLOW times the median step if that is longer.
LEAST_LIMIT_SECONDS = 60.0
_FEWEST_STEPS = 3
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
# Modules of titanlab and of torch that read or write files: a rank inside them waits for a disk, not for other ranks.
_OWN_FILE_MODULES = (
    *("data/", "techniques/tracker/", "checkpoint/", "system/terminal.py", "system/files.py"),
    *("train/weights.py", "train/interchange.py", "train/starting_weights.py"),
    *("train/dcp.py", "train/initialise.py"),
    *("records/files.py", "records/run_folder.py", "records/claim.py", "records/outcome.py"),
)
_TORCH_FILE_MODULES = ("torch/distributed/checkpoint/", "torch/serialization.py")
# Longest time between two checks of the watchdog's thread; with short limits it checks more often.
_LOOK_SECONDS = 2.0
# With more than 512 ranks each rank checks less often, to spare the file server, but often enough for ANSWER_SECONDS.
_LOOKS_A_SECOND = 128
_MOST_LOOK_SECONDS = 5.0
# How long the main thread's CPU time is measured. A thread that computes has a core for this share of it.
BUSY_SECONDS = 0.5
_BUSY_SHARE = 0.1
# A rank that hangs waits this long between its note and its exit, so that the other ranks can write their own stacks.
LINGER_SECONDS = 5.0
# If native code holds the GIL, the watchdog's thread cannot run. Then the timer of faulthandler ends the process, this
# much later than the thread would: with stacks and exit code 1, without a note.
_NATIVE_MARGIN_SECONDS = 15.0
# The beginning of the text that faulthandler writes when its timer ends a process.
NATIVE_SIGN = "Timeout ("
_FRAMES = 60
# After one rank's note of a hang, every other rank has this time to write its own note.
ANSWER_SECONDS = 8.0
_POLL_SECONDS = 0.2
# Time for a process that is blocked in native code to write its stacks into its log.
_STACKS_SECONDS = 0.5
_MOST_RANKS = 1_000_000
STATES: Mapping[str, str] = {
    "T": "its process is stopped (SIGSTOP)",
    "t": "its process is stopped by a debugger",
    "D": "its process waits for a disk or a file server (state D)",
    "R": "its process runs native code that lets no other thread run (state R)",
    "S": "its process sleeps in native code that lets no other thread run (state S)",
    "Z": "its process is gone",
}


class StepTimes:
    """Durations of the steps of an attempt, in seconds, without the pauses between them."""

    def __init__(self) -> None:
        # The first step includes compilation, so it does not count for the usual time of a step.
        self._first: float | None = None
        self._later: collections.deque[float] = collections.deque(maxlen=100)

    def add(self, seconds: float) -> None:
        if self._first is None:
            self._first = seconds
        else:
            self._later.append(seconds)

    def limit(self) -> float | None:
        """The limit of a step if the config has none, in seconds; None until three steps after the first are known."""
        return max(LEAST_LIMIT_SECONDS, _SLOW * self._median()) if len(self._later) >= _FEWEST_STEPS else None

    def advice(self, key: str, limit: float | None) -> str:
        """A text with the times of earlier steps, and the setting to try if this step was only slow."""
        if self._first is None:
            usual, times = 0.0, "no step is complete yet"
        elif not self._later:
            usual, times = self._first, f"the one step before it took {trimmed(self._first)} s"
        else:
            usual = self._median()
            times = f"steps before it took {trimmed(usual)} s (median of {len(self._later)})"
        if limit is None:
            return times
        if self._later and limit >= _SLOW * usual:
            return f"{times}; {key}={limit:g}"
        return f"{times}; if it was only slow, try {key}={math.ceil(max(2 * limit, _SLOW * usual))}"

    def _median(self) -> float:
        # Imported here: the launcher needs no statistics.
        import statistics

        return statistics.median(self._later)


class _Phase(NamedTuple):
    """What a rank has done since `begin`; `limit`: its longest time in seconds, set by `key`; `step`: the last done."""

    where: str
    step: int
    begin: float
    limit: float | None
    key: str = FIRST_STEP_KEY


class Watchdog:
    """Watches one rank until `close`. The start of the process has the same limit as the first step.

    The training loop reports its phase, which costs one assignment; a thread compares the phase's time with its limit.

    Args:
        step_seconds: limit of a step; 0: no limit; None: `StepTimes.limit`, or `first_seconds` while that is not known.
        first_seconds: limit of the start, of the first step and of pauses; None: no limit.
        note: called before the process of a rank that hangs ends, with the rank's outcome and its record for the
            diagnosis (None: there is no record).
        world: number of ranks of the run, which all look for notes in its folder.
        is_asked: returns whether another rank hangs, so that this rank must write its note too.
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
        self._step_seconds, self._first_seconds = step_seconds, first_seconds
        self._note, self._rank, self._attempt = note, rank, attempt
        self._times, self._stepped = StepTimes(), False
        self._place: Callable[..., Mapping[str, Any]] = dict
        self._phase = _Phase("the start", 0, time.monotonic(), first_seconds)
        self._closed = threading.Event()
        limits = [limit for limit in (step_seconds, first_seconds) if limit]
        usual = min(_MOST_LOOK_SECONDS, max(_LOOK_SECONDS, world / _LOOKS_A_SECOND))
        self._look_seconds = min([usual, *(limit / 4 for limit in limits)])
        if limits or step_seconds is None:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def learn(self, place: Callable[..., Mapping[str, Any]]) -> None:
        """Set the function that gives those fields of this rank's record that torch knows; see `topology`."""
        self._place = place

    def step(self, step: int) -> None:
        """Tell the watchdog that a step begins; all steps before it are complete."""
        now = time.monotonic()
        if self._stepped:
            self._times.add(now - self._phase.begin)
        limit, key = self._first_seconds, FIRST_STEP_KEY
        if self._stepped and self._step_seconds is not None:
            limit, key = self._step_seconds or None, STEP_KEY
        elif self._stepped and (usual := self._times.limit()) is not None:
            limit, key = usual, STEP_KEY
        self._stepped = True
        self._phase = _Phase(f"step {step}", step - 1, now, limit, key)

    @contextlib.contextmanager
    def pausing(self, what: str, step: int) -> Iterator[None]:
        """Inside the block, the limit is `first_seconds`: work between steps may take longer than a step."""
        before, begin = self._phase, time.monotonic()
        self._phase = _Phase(f"{what} after step {step}", step, begin, self._first_seconds)
        try:
            yield
        finally:
            self._phase = before._replace(begin=before.begin + time.monotonic() - begin)

    def ending(self, step: int) -> None:
        """Tell the watchdog that no step follows; the end of the run has the limit of a pause."""
        self._phase = _Phase(f"the end after step {step}", step, time.monotonic(), self._first_seconds)

    @property
    def done(self) -> int:
        """The number of the last complete step."""
        return self._phase.step

    def record_of_error(self, error: BaseException) -> HangRecord:
        """The record of a rank whose main thread has raised an error."""
        frames = list(traceback.walk_tb(error.__traceback__))
        return self._record(frames[::-1], "raised", self._phase, limit=None)

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        faulthandler.cancel_dump_traceback_later()

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
        """Record where this rank is, and end its process; `since`: seconds in the phase, if another rank hangs.

        A rank that waits for a collective or for its device is a secondary failure (`echo`). A rank that is anywhere
        else, or that computes, keeps the others waiting.
        """
        # This timer ends the process even if the note cannot be written because the file system does not respond.
        faulthandler.dump_traceback_later(BUSY_SECONDS + LINGER_SECONDS + _NATIVE_MARGIN_SECONDS, exit=True)
        is_busy = self._idle_waits and main_thread_is_busy()
        frames = list(traceback.walk_stack(sys._current_frames()[threading.main_thread().ident or 0]))
        lines = _code_lines(frames)
        # Skip the standard library: the caller of `queue.get` tells more than `queue.get`.
        line = next((line for line in lines if not _is_standard(line.file)), lines[0])
        state: RankState = "waits" if waits_for_others(line.file) else "stands"
        if is_busy:
            state = "computes"
        event, limit = f"{phase.where} did not end within {phase.limit or 0.0:g} s", phase.limit
        if since is not None:
            limit = None
            event = f"{phase.where} had not ended after {trimmed(since)} s, when another rank reached its limit"
        outcome = Outcome(
            kind=OutcomeKind.HANG,
            step=phase.step,
            rank=self._rank,
            attempt=self._attempt,
            cause=f"{event}: rank {self._rank} {state} in {line}; {self._times.advice(phase.key, limit)}",
            traceback="".join(["Traceback (most recent call last):\n", *traceback.format_stack(frames[0][0])]),
            exit_code=OutcomeKind.HANG.exit_code,
            echo=state == "waits",
        )
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"{outcome.cause}. Stacks of all threads:\n")
            sys.stderr.flush()
        faulthandler.dump_traceback(file=2, all_threads=True)
        record = None
        with contextlib.suppress(Exception):
            record = self._record(frames, state, phase, limit=limit)
        noted = time.monotonic()
        with contextlib.suppress(Exception):
            self._note(outcome, record)
            if record is not None:
                # Look up lines of code only now: for thousands of collectives torch may need seconds.
                lined = self._place(with_lines=True)["collectives"]
                # If torch's recorder does not answer in time, keep the collectives that the record has.
                if len(lined) >= len(record.collectives):
                    self._note(outcome, replace(record, collectives=lined))
        time.sleep(max(noted + LINGER_SECONDS - time.monotonic(), 0.0))
        os._exit(OutcomeKind.HANG.exit_code)

    def _record(self, frames: Sequence[_Frame], state: RankState, phase: _Phase, *, limit: float | None) -> HangRecord:
        activity, lines = "", []
        for line in _code_lines(frames):
            own = line.file.removeprefix(_PACKAGE) if line.file.startswith(_PACKAGE) else ""
            if line.function == "next_batch" or own.startswith("data/"):
                activity = activity or "data"
            elif own.startswith("checkpoint/"):
                activity = activity or "checkpoint"
            lines.append(_without_folder(line))
        known = {"groups": {}, "messages": None, "collectives": (), **self._place()}
        return HangRecord(
            rank=self._rank,
            time=time.time(),
            state=state,
            phase=phase.where,
            step=phase.step,
            seconds=time.monotonic() - phase.begin,
            limit=limit,
            activity=activity,
            source=innermost_own(lines),
            stack=tuple(lines[:_FRAMES]),
            **known,
        )


_Frame = tuple[FrameType, int]


def _code_lines(frames: Sequence[_Frame]) -> list[CodeLine]:
    return [CodeLine(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in frames]


def _without_folder(line: CodeLine) -> CodeLine:
    is_own = line.file.startswith(_PACKAGE)
    return replace(line, file=f"titanlab/{line.file.removeprefix(_PACKAGE)}") if is_own else line


def innermost_own(lines: Iterable[CodeLine]) -> CodeLine | None:
    """The innermost line of titanlab or of the user; `lines` begin with the innermost line."""
    torch = f"{os.sep}torch{os.sep}"
    own = (line for line in lines if not _is_standard(line.file) and torch not in line.file)
    return next(map(_without_folder, own), None)


def main_thread_is_busy() -> bool:
    """Whether the main thread of this process computes, or waits for a core, during half a second.

    Waiting counts because on a busy host a thread that computes may get less than a tenth of a core. Returns False if
    Linux's scheduler keeps no statistics, or the system is not Linux.
    """

    def used_nanoseconds() -> int:
        running, waiting, *_ = Path(f"/proc/self/task/{os.getpid()}/schedstat").read_text().split()
        return int(running) + int(waiting)

    try:
        begin = used_nanoseconds()
        time.sleep(BUSY_SECONDS)
        return used_nanoseconds() - begin >= _BUSY_SHARE * BUSY_SECONDS * 1e9
    except (OSError, ValueError):
        return False


def _is_standard(file: str) -> bool:
    """Whether a source file is in Python's standard library."""
    return file.startswith("<frozen ") or (file.startswith(_STANDARD_LIBRARY) and "-packages" + os.sep not in file)


def waits_for_others(file: str) -> bool:
    """Whether a rank in this source file waits for others: torch's and titanlab's files, except those for file I/O."""
    if file.startswith(_PACKAGE):
        return not file.removeprefix(_PACKAGE).startswith(_OWN_FILE_MODULES)
    is_torch = f"{os.sep}torch{os.sep}" in file
    return is_torch and not any(f"{os.sep}{part}" in file for part in _TORCH_FILE_MODULES)


def hangs_of_others(run: RunFolder, rank: int | None, *, since: float) -> list[Outcome]:
    """Notes of hangs in the run's newest attempt, except those of `rank`; empty if the notes cannot be read."""
    try:
        notes = run.failures(run.newest_attempt())
    except (OSError, ValueError):
        return []
    return [note for note in notes if note.kind is OutcomeKind.HANG and note.rank != rank and note.ended >= since]


def await_notes(run: RunFolder, pids: Mapping[int, int], *, since: float, world: int | None = None) -> bool:
    """If ranks hang, wait until every rank has a note; write the note for a rank of this host that writes none.

    Args:
        pids: process numbers by rank, of the ranks of this host that have not ended.
        world: number of ranks of the run; None: do not wait for other hosts' ranks.

    Returns:
        whether a rank of this host wrote no note: it must be killed before it can write a second note.
    """
    begin, are_silent = time.monotonic(), False
    while hangs_of_others(run, None, since=since):
        noted = {note.rank for note in run.failures(run.newest_attempt())}
        states = {rank: process_state(pid) for rank, pid in pids.items() if rank not in noted}
        quiet = [rank for rank, state in states.items() if state not in ("Z", None)]
        waited = time.monotonic() - begin
        # A stopped process will write nothing: do not wait for it.
        if quiet and (waited >= ANSWER_SECONDS or all(states[rank] in STOPPED for rank in quiet)):
            for rank in quiet:
                are_silent |= note_silence(run, rank, pids[rank], since=since)
        elif not quiet and (world is None or len(noted) >= world):
            break
        if waited >= 2 * ANSWER_SECONDS:
            break
        time.sleep(_POLL_SECONDS)
    return are_silent


def note_silence(run: RunFolder, rank: int, pid: int, *, since: float) -> bool:
    """If others hang and a rank has no note, write one: "does not answer". Returns whether this was done."""
    others = hangs_of_others(run, rank, since=since)
    attempt = run.newest_attempt()
    if not others or any(note.rank == rank for note in run.failures(attempt)):
        return False
    state = process_state(pid)
    if state in ("R", "S", "D"):
        # SIGUSR1 lets faulthandler write the stacks of the process, for which it does not need the GIL.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
        time.sleep(_STACKS_SECONDS)
    why = STATES.get(state or "", "nothing is known of its process")
    cause = _framed(others, f"rank {rank} does not answer: {why}")
    step = min(note.step for note in others)
    run.write_failure(Outcome(kind=OutcomeKind.HANG, step=step, rank=rank, attempt=attempt, cause=cause))
    return True


# The cause in the note of a rank that hangs, or that does not answer.
_CAUSE = re.compile(r"(.+?): rank \d+ (.+?)(?:; (.+))?")


def _told(note: Outcome) -> Sequence[str]:
    """The event of a note (`step 3 did not end within 600 s`), what the rank does, and the advice."""
    match = _CAUSE.fullmatch(note.cause or "")
    return ("", note.cause or note.kind.meaning, "") if match is None else match.groups("")


def _framed(notes: Collection[Outcome], text: str) -> str:
    """The step that did not end, then the text of a verdict, then the advice from the note of a rank that hangs."""
    # Ranks may be in different steps: the earliest of these steps is the one that does not end.
    told = [_told(note) for note in sorted(notes, key=lambda note: note.step)]
    event = next((event for event, *_ in told if "did not end" in event), "a step did not end in time")
    advice = next((f"; {advice}" for *_, advice in told if "timeout_seconds=" in advice), "")
    return f"{event}: {text}{advice}"


def judged(notes: Collection[Outcome], world: int, records: Mapping[int, HangRecord]) -> Outcome:
    """The outcome of an attempt from its ranks' notes: the first cause, and for a hang the verdict of the diagnosis."""
    first = first_cause(notes)
    hung = [note for note in notes if note.kind is OutcomeKind.HANG]
    # A rank that ended with exit code 0 has not failed, but it may have left the other ranks waiting.
    if first.echo or is_silent(first) or (records and (first in hung or first.exit_code == 0)):
        if not (records or hung):
            return first
        diagnosis = _diagnosis_of(notes, world, records)
        verdict, ranks = diagnosis.verdict, list(diagnosis.ranks)
    elif first.exit_code == -signal.SIGABRT or "gloo" in (first.cause or ""):
        # If sizes differ, gloo ends the receiving process or raises in it, although the sender may be at fault.
        findings = itertools.chain(different_calls(records), odd_calls(records, first.rank or 0))
        if (finding := next(findings, None)) is None:
            return first
        verdict, ranks = f"{finding[0]}; rank {first.rank}: {first.cause}", list(finding[1])
    else:
        return first
    cause = _framed(hung, verdict) if hung else verdict
    if not ranks:
        # Do not name a rank that only waits: its host would be left out of later jobs.
        return replace(first, rank=None, cause=cause, echo=False)
    note = next((note for note in notes if note.rank == ranks[0]), None)
    if note is None or is_silent(note):
        return replace(first, rank=ranks[0], cause=cause, traceback=None, exit_code=None, echo=False)
    # The traceback of a rank that lost its connection does not show the cause.
    trace = None if note.echo and note not in hung else note.traceback
    return replace(note, kind=first.kind, cause=cause, traceback=trace, echo=False)


def _diagnosis_of(notes: Collection[Outcome], world: int, records: Mapping[int, HangRecord]) -> Diagnosis:
    """The diagnosis of an attempt whose ranks hung, or lost their connection to a rank."""
    silent, ended = {}, {}
    noted = {note.rank: note for note in notes if note.rank is not None}
    for rank, note in noted.items():
        if is_silent(note):
            silent[rank] = _told(note)[1].removeprefix("does not answer: ")
        elif note.kind is not OutcomeKind.HANG and not note.echo:
            ended[rank] = note.cause or note.kind.meaning
    if not any(note.kind is OutcomeKind.HANG for note in notes):
        # Ranks without a note or a record: other ranks have lost the connection to them, so their processes are gone.
        gone = set(range(world)) - {*noted, *records}
        ended |= dict.fromkeys(gone, "its process is gone and has left no record")
    unread = set(noted) - {*records, *silent, *ended}
    return diagnose(records, world=world, silent=silent, ended=ended, unread=unread)


@dataclass(frozen=True, kw_only=True)
class HungAttempt:
    """The diagnosis of an attempt that hung, a row for each rank, and a line for each damaged record."""

    diagnosis: Diagnosis
    rows: Sequence[Mapping[str, Any]]
    damaged: Sequence[str]


def has_hung(run: RunFolder, attempt: int) -> bool:
    """Whether a rank of an attempt has left a note of a hang."""
    return any(note.kind is OutcomeKind.HANG for note in run.failures(attempt))


def hung_attempt(run: RunFolder, attempt: int) -> HungAttempt:
    """Read and diagnose the records of an attempt that hung."""
    records, damaged = read_hang(run, attempt)
    notes, world = run.failures(attempt), world_of(run, attempt)
    diagnosis = _diagnosis_of(notes, world, records)
    others = {note.rank or 0: _told(note)[1] for note in notes} | dict.fromkeys(damaged, "damaged")
    rows = rank_rows(diagnosis, records, others, world=world)
    return HungAttempt(diagnosis=diagnosis, rows=rows, damaged=list(damaged.values()))


def world_of(run: RunFolder, attempt: int) -> int:
    """Number of ranks of an attempt; 0 if its config does not say."""
    try:
        world = run.config(attempt).get("world")
    except ConfigError:
        return 0
    return world if isinstance(world, int) and 0 < world <= _MOST_RANKS else 0
