"""Whether a run goes on: somebody works on it, it waits in a queue, or it will be put back into one."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

from titanlab.records.outcome import OutcomeKind
from titanlab.records.run_folder import RunFolder
from titanlab.records.run_status import Status
from titanlab.sweep.sweep_folder import SweepFolder, jobs_of
from titanlab.sweep.table.listing import ACTIVE
from titanlab.sweep.table.look import look_at
from titanlab.system.process_start import born_at

# How often the table of the sweep is read, and with it the scheduler's queue.
_LOOK_SECONDS = 5.0
# A run of another host is given up when it has written nothing for this time, and nobody holds its lock.
_SILENT_SECONDS = 300.0
_SILENT_HERE_SECONDS = 10.0


class RunWatch:
    """Watches one run.

    Args:
        clock: monotonic time in seconds.
        now: seconds since the epoch.
    """

    def __init__(
        self, run: RunFolder, *, clock: Callable[[], float] = time.monotonic, now: Callable[[], float] = time.time
    ) -> None:
        self._run = run
        self._sweep = SweepFolder(run.path.parent.absolute())
        self._look = look_at(self._sweep)
        self._clock, self._now = clock, now
        self._due = -float("inf")
        self._last: tuple[bool, str] = (True, "")

    def goes_on(self) -> tuple[bool, str]:
        """Whether it goes on, and a line that says why it waits, or why it does not go on; the line may be empty."""
        if self._run.is_claimed():
            self._due = -float("inf")
            return True, ""
        status = self._run.known_status()
        if status is not None and status.state == "ended" and not _may_return(status):
            return False, f"ended: {status.outcome}"
        if self._clock() >= self._due:
            self._due = self._clock() + _LOOK_SECONDS
            self._last = self._judged(status)
        return self._last

    def _judged(self, status: Status | None) -> tuple[bool, str]:
        if self._run.path.name not in jobs_of(self._sweep, self._sweep.submissions()):
            return self._without_job(status)
        row: dict[str, Any] | None = next(
            (row for row in self._look() if row["run"] == self._run.path.name and row["state"] != "dropped"), None
        )
        if row is None:
            return False, "is not in its sweep any more"
        if row["state"] == "queued":
            reason = f": {row['queue_reason']}" if row["queue_reason"] else ""
            return True, f"waits in the queue{reason}"
        if row["state"] in ACTIVE or row["state"] == "prepared":
            return True, ""
        return False, f"{row['state']}: {row['outcome'] or row['cause'] or 'unknown'}"

    def _without_job(self, status: Status | None) -> tuple[bool, str]:
        """The same of a run that no launcher has submitted."""
        if status is None or status.state == "prepared":
            return False, "nobody has started it"
        if status.state == "ended":
            return False, f"ended: {status.outcome}"
        silent = self._now() - status.updated
        is_here = status.host == socket.gethostname()
        if is_here and born_at(status.pid) is not None:
            return True, ""
        if silent < (_SILENT_HERE_SECONDS if is_here else _SILENT_SECONDS):
            return True, ""
        return False, "nobody works on it any more, and it left no result"


def _may_return(status: Status) -> bool:
    """Whether a job may put itself back into the queue after such an end."""
    return status.outcome in {kind.value for kind in OutcomeKind} and OutcomeKind(status.outcome).automatic
