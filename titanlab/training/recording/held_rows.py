"""Rows for a tracker that wait until a checkpoint has their step, so that a rollback takes none back.

wandb takes the steps of a run in ascending order and drops a second row of a step; TensorBoard shows both.
"""

from __future__ import annotations

import time as clock
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from titanlab.tracker.contract import Tracker, Warn
from titanlab.tracker.tracked_run import TrackedRun


class HeldRows(Tracker):
    """A tracker whose rows after the newest checkpoint wait.

    Args:
        tracker: started; it gets the rows.
        saved_step: the step of the newest checkpoint.
    """

    def __init__(self, tracker: Tracker, saved_step: Callable[[], int]) -> None:
        self._tracker, self._saved_step = tracker, saved_step
        self._rows: deque[tuple[int, Mapping[str, Any], float]] = deque()
        self._logged = 0

    def start(self, run: TrackedRun, *, warn: Warn) -> None:
        """Nothing to do: the tracker is started."""

    def log(self, step: int, metrics: Mapping[str, Any], *, time: float | None = None) -> None:
        """Keep a row with its time, and log those whose step is saved."""
        self._rows.append((step, dict(metrics), clock.time() if time is None else time))
        self._release(self._saved_step())

    def go_back(self, to: int) -> None:
        """Drop the rows after a step, from which the run goes on."""
        self._rows = deque(row for row in self._rows if row[0] <= to)

    def finish(self, summary: Mapping[str, Any], *, exit_code: int = 0) -> None:
        """Log all rows, and finish."""
        self._release(None)
        self._tracker.finish(summary, exit_code=exit_code)

    def kept_files(self, run: Path) -> frozenset[Path]:
        """The tracker's files."""
        return self._tracker.kept_files(run)

    def put_aside(self, run: Path, paths: Iterable[Path], *, keep: bool) -> None:
        """Move or remove the tracker's files."""
        self._tracker.put_aside(run, paths, keep=keep)

    def _release(self, until: int | None) -> None:
        while self._rows and (until is None or self._rows[0][0] <= until):
            step, metrics, time = self._rows.popleft()
            # Lower only if the run went back behind its newest checkpoint, which was damaged.
            if step >= self._logged:
                self._tracker.log(step, metrics, time=time)
                self._logged = step
