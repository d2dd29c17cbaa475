"""What a tracker is told about a run, and how the one rank that writes opens it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titanlab.tracker.contract import Tracker, TrackerConfig, Warn
from titanlab.tracker.record import FILE


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """What a tracker is told about a run.

    Attributes:
        id: the same in all attempts, so that a resumed run continues its charts: digits of its identity.
        name: what people see, such as the run folder's name.
        sweep: the collection that it belongs to.
        folder: of the run; a tracker's own files go there.
        config: the resolved recipe as plain values.
        layout: degree of each axis; also given as flat `layout.*` keys, to group and filter by.
        facts: further flat keys: model parameters, tokens per step, device, the layout's label, the sweep's point …
        tags: model, hardware, precision.
        job_type: `train`, `bench` or `eval`.
        attempt: number of the attempt, from 1.
        resumed_step: the step after which the attempt continues; 0: it starts from the beginning.
        is_live: a process trains it now; otherwise its rows are read from metrics.jsonl, and no machine is watched.
    """

    id: str
    name: str
    sweep: str
    folder: Path
    config: Mapping[str, Any]
    layout: Mapping[str, int]
    facts: Mapping[str, Any] = field(default_factory=dict)
    tags: Sequence[str] = ()
    job_type: str = "train"
    attempt: int = 1
    resumed_step: int = 0
    is_live: bool = True

    @property
    def record(self) -> Path:
        """Where the tracker notes how far it got."""
        return self.folder / "attempts" / str(self.attempt) / FILE if self.is_live else self.folder / FILE

    def flat_config(self) -> dict[str, Any]:
        """The recipe, with facts and `layout.*` beside it."""
        layout = {f"layout.{axis}": degree for axis, degree in self.layout.items()}
        return {**self.config, **self.facts, **layout, "attempt": self.attempt}


def open_tracker(config: TrackerConfig, run: TrackedRun, *, warn: Warn) -> Tracker:
    """The configured tracker, started. Only the rank that writes metrics calls this.

    Args:
        config: of the group `tracker`.
        warn: called with one line if the tracker has to give up.

    Raises:
        ConfigError: its package is not installed.
    """
    config.check_installed()
    tracker = config.implementation()
    tracker.start(run, warn=warn)
    return tracker
