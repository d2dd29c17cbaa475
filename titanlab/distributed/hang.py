"""A rank whose step does not end: where it is in the code, whether it waits for others, and what it writes.

`hung_attempt` reads the records of all ranks of an attempt.
"""

from __future__ import annotations

import collections
import os
import statistics
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType, TracebackType

from titanlab.distributed.silence import diagnosis_of
from titanlab.errors import ConfigError
from titanlab.records import (
    CodeLine,
    Collective,
    Diagnosis,
    GroupRecord,
    HangRecord,
    Messages,
    Outcome,
    OutcomeKind,
    RankState,
    RunFolder,
    read_hang,
)
from titanlab.system import trimmed

STEP_KEY = "training.step_timeout_seconds"
FIRST_STEP_KEY = "training.first_step_timeout_seconds"
# A step that takes at least this many times the usual time hangs; a shorter one may only be slow.
_SLOW = 10
# The limit of a step if the config has none: this, or _SLOW times the median step, once so many steps are known.
LEAST_LIMIT_SECONDS = 60.0
_FEWEST_STEPS = 3
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep
# Modules of titanlab and of torch that read or write files: a rank in one of them waits for a disk, not for a rank.
_OWN_FILE_MODULES = (
    *("data/", "techniques/tracker/", "checkpoint/", "system/terminal.py", "system/files.py"),
    *("train/weights_", "train/hub_folders.py", "train/interchange.py", "train/starting_weights.py"),
    *("train/dcp.py", "train/initialise.py"),
    *("records/metrics_file.py", "records/run_folder.py", "records/claim.py", "records/outcome.py"),
    *("records/json_file.py",),
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
                # It includes compilation, so later steps are not compared with it.
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
    titanlab's code that calls torch. A rank that is anywhere else, or computes, keeps the others waiting.

    Args:
        where: the phase, such as `step 3`.
        limit: seconds that the phase may take.
        frame: the innermost frame of the main thread.
        busy: whether the main thread computes.
        since: seconds since the phase began, if another rank reached its limit first.
        advice: text to append to the cause.
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
        # With the last two parts of the path, also where it is titanlab's own.
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
    """Seconds in which the main thread has used a core or has waited for one; None where the system is not Linux."""
    task = Path(f"/proc/self/task/{os.getpid()}")
    try:
        # On a busy host a thread that computes may get less than a tenth of a core.
        running, waiting, *_ = map(int, (task / "schedstat").read_text().split())
        return (running + waiting) / 1e9
    except (OSError, ValueError):
        pass
    try:
        fields = (task / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    # A kernel without statistics of its scheduler. utime and stime in proc(5); the field after the parenthesis has
    # index 0 here.
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


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
    """A rank's place among the others, as far as it is known yet.

    Attributes:
        groups: by torch's name of a process group.
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


@dataclass(frozen=True, kw_only=True)
class HungAttempt:
    """The records of an attempt and their diagnosis."""

    diagnosis: Diagnosis
    records: Mapping[int, HangRecord]
    others: Mapping[int, str]
    damaged: Mapping[int, str]
    world: int


def has_hung(run: RunFolder, attempt: int) -> bool:
    """Whether ranks of an attempt have noted that they hang."""
    return any(note.kind is OutcomeKind.HANG for note in run.failures(attempt))


def hung_attempt(run: RunFolder, attempt: int) -> HungAttempt:
    """Read and diagnose the records of an attempt that hung."""
    records, damaged = read_hang(run, attempt)
    notes = run.failures(attempt)
    try:
        world = run.config(attempt).get("world")
    except ConfigError:
        world = None
    size = world if isinstance(world, int) and not isinstance(world, bool) and 0 < world <= _MOST_RANKS else 0
    others = {
        note.rank: (note.cause or "").rpartition(f"rank {note.rank} ")[2].partition(";")[0] or note.kind.meaning
        for note in notes
        if note.rank is not None and note.rank not in records
    }
    diagnosis = diagnosis_of(notes, size, records)
    return HungAttempt(diagnosis=diagnosis, records=records, others=others, damaged=damaged, world=size)


_MOST_RANKS = 1_000_000
