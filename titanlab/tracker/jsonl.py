"""tracker=jsonl: only metrics.jsonl, which every run writes with every tracker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from titanlab.tracker.contract import Tracker, Warn
from titanlab.tracker.tracked_run import TrackedRun


class JsonlTracker(Tracker):
    """Does nothing: the run writes metrics.jsonl and result.json itself."""

    def start(self, run: TrackedRun, *, warn: Warn) -> None:
        """Nothing to open."""

    def log(self, step: int, metrics: Mapping[str, Any], *, time: float | None = None) -> None:
        """The row is in metrics.jsonl already."""

    def finish(self, summary: Mapping[str, Any], *, exit_code: int = 0) -> None:
        """The summary is in result.json already."""
