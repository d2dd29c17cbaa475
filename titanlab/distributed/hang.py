"""What is said of a rank whose step does not end: where it stands, whether it waits for others, how long steps took."""

from __future__ import annotations

import collections
import os
import statistics
import sysconfig
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from titanlab.records.outcome import Outcome, OutcomeKind

STEP_KEY = "training.step_timeout_seconds"
FIRST_STEP_KEY = "training.first_step_timeout_seconds"
# A step that takes this much longer than the others hangs; one below may be slow.
_SLOW = 10
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep
# Of ours and of torch's, what reads or writes files: it waits for a disk, not for another rank.
_FILES_OF_OURS = (
    *("data/", "tracker/", "weights/", "checkpoint/", "terminal/console.py", "system/atomic_file.py"),
    *("records/metrics_file.py", "records/run_folder.py", "records/run_records.py", "records/claim.py"),
    *("records/run_status.py", "records/end_file.py", "records/json_file.py"),
)
_FILES_OF_TORCH = ("torch/distributed/checkpoint/", "torch/serialization.py")
# For so long the main thread's use of the processor is measured.
BUSY_SECONDS = 0.5
_BUSY_SHARE = 0.1


class StepTimes:
    """How long the steps of an attempt have taken, apart from pauses between them."""

    def __init__(self) -> None:
        self._begin: float | None = None
        self._paused = 0.0
        self._first: float | None = None
        self._later: collections.deque[float] = collections.deque(maxlen=100)

    def step(self) -> None:
        """A step begins, and the one before it is complete."""
        now = time.monotonic()
        if self._begin is not None:
            seconds = now - self._begin - self._paused
            if self._first is None:
                # With its compilation: no measure of the others.
                self._first = seconds
            else:
                self._later.append(seconds)
        self._begin, self._paused = now, 0.0

    def paused(self, seconds: float) -> None:
        """So much of the time since the step began was none of its own."""
        self._paused += seconds

    def advice(self, key: str, limit: float | None) -> str:
        """How long steps took, and what to set if this one was only slow.

        Args:
            key: of the limit that was reached.
            limit: in seconds.
        """
        later = list(self._later)
        usual = statistics.median(later) if later else self._first
        if usual is None:
            told = "no step is complete yet"
        elif later:
            told = f"steps before it took {usual:.3g} s (median of {len(later)})"
        else:
            told = f"the one step before it took {usual:.3g} s"
        if limit is None:
            return told
        if usual is not None and later and limit >= _SLOW * usual:
            return f"{told}; {key}={limit:g}"
        return f"{told}; if it was only slow, try {key}={_rounded_up(max(2 * limit, _SLOW * (usual or 0.0))):g}"


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
    """The outcome of a rank that did not come on.

    It is an echo where the rank waits for others: for a collective or its device, deep in torch or in our own code
    that calls it. A rank that stands elsewhere, or computes, keeps them waiting.

    Args:
        frame: the innermost of its main thread.
        busy: whether its main thread computes, and does not wait for anything.
        since: seconds since it began, where another rank's limit was reached before its own.
        advice: what else there is to say.
    """
    cause = f"{where} did not end within {limit:g} s"
    if since is not None:
        cause = f"{where} had not ended after {since:.3g} s, when another rank reached its limit"
    cause += f": rank {rank}"
    text, waits = None, False
    if frame is not None:
        text = "".join(["Traceback (most recent call last):\n", *traceback.format_stack(frame)])
        frame = _telling(frame)
        code = frame.f_code
        waits = not busy and _waits_for_others(code.co_filename)
        file = Path(code.co_filename)
        verb = "waits" if waits else "computes" if busy else "stands"
        cause += f" {verb} in {code.co_name} ({file.parent.name}/{file.name}:{frame.f_lineno})"
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
    """Whether this process's main thread has used the processor during half a second; False where nobody can tell."""
    begin = _main_thread_seconds()
    time.sleep(BUSY_SECONDS)
    end = _main_thread_seconds()
    return begin is not None and end is not None and end - begin >= _BUSY_SHARE * BUSY_SECONDS


def _main_thread_seconds() -> float | None:
    """Seconds of the processor that the main thread has used; None elsewhere than on Linux."""
    try:
        words = Path(f"/proc/self/task/{os.getpid()}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    # utime and stime, see proc(5), counted from the state.
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _telling(frame: FrameType) -> FrameType:
    """The innermost frame that is not of Python's own library: `queue.get` says nothing, its caller does."""
    return next((each for each in _frames(frame) if not _is_standard(each.f_code.co_filename)), frame)


def _is_standard(file: str) -> bool:
    if file.startswith("<frozen "):
        return True
    return file.startswith(_STANDARD_LIBRARY) and "-packages" + os.sep not in file


def _waits_for_others(file: str) -> bool:
    """Whether code computes or communicates: torch's does, and ours, but for what reads or writes files."""
    if file.startswith(_PACKAGE + os.sep):
        return not file.removeprefix(_PACKAGE + os.sep).startswith(_FILES_OF_OURS)
    if any(f"{os.sep}{part}" in file for part in _FILES_OF_TORCH):
        return False
    return f"{os.sep}torch{os.sep}" in file


def _rounded_up(seconds: float) -> float:
    """To two digits, so that it can be typed."""
    unit = 10.0 ** (len(str(int(seconds))) - 2) if seconds >= 10 else 1.0
    return -(-seconds // unit) * unit
