"""Config of tracker=jsonl."""

from __future__ import annotations

from dataclasses import dataclass

from titanlab.options import option
from titanlab.tracker.contract import Tracker, TrackerConfig


@option("tracker", "jsonl")
@dataclass(kw_only=True)
class Jsonl(TrackerConfig):
    """Only the run's own metrics.jsonl."""

    kind: str = "jsonl"

    def implementation(self) -> Tracker:
        from titanlab.tracker.jsonl import JsonlTracker

        return JsonlTracker()
