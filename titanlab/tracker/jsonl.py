"""tracker=jsonl: nothing beyond metrics.jsonl, which the run folder writes under every tracker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from titanlab.tracker.jsonl_schema import Jsonl
from titanlab.tracker.protocol import TrackedRun, Warn


class JsonlTracker:
    """Does nothing more."""

    def start(self, run: TrackedRun) -> None:
        """Nothing to open."""

    def log(self, step: int, metrics: Mapping[str, Any], *, time: float | None = None) -> None:
        """The row is in metrics.jsonl already."""

    def finish(self, summary: Mapping[str, Any], *, exit_code: int = 0) -> None:
        """The summary is in result.json already."""


def build(config: Jsonl, *, warn: Warn) -> JsonlTracker:
    """The tracker that `config` describes."""
    return JsonlTracker()
