"""Config of tracker=jsonl."""

from __future__ import annotations

from dataclasses import dataclass

from titanlab.options import option
from titanlab.tracker.contract import Tracker, TrackerConfig


@option("tracker", "jsonl")
@dataclass(kw_only=True)
class Jsonl(TrackerConfig):
    """The run's own metrics.jsonl and nothing else."""

    kind: str = "jsonl"

    def implementation(self) -> Tracker:
        from titanlab.tracker.jsonl import JsonlTracker

        return JsonlTracker()
