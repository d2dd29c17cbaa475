"""The description of a run that a tracker gets, and the start of the tracker on the rank that writes metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titanlab.tracker.contract import Tracker, TrackerConfig, Warn
from titanlab.tracker.record import FILE


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """The description of a run for a tracker.

    Attributes:
        id: digits of the run's identity; the same in all attempts, so that a resumed run continues its charts.
        name: the displayed name, such as the run folder's name.
        sweep: the sweep that the run belongs to.
        folder: of the run; a tracker writes its files into it.
        config: the resolved recipe as plain values.
        layout: degree of each axis; `flat_config` has them as `layout.*` keys too, for grouping and filtering.
        facts: further flat keys: model parameters, tokens per step, device, the layout's label, the sweep's point …
        tags: model, hardware, precision.
        job_type: `train`, `bench` or `eval`.
        attempt: number of the attempt, from 1.
        resumed_step: the step after which the attempt continues; 0: it starts from the beginning.
        is_live: whether a process trains the run now; otherwise rows come from metrics.jsonl, and the tracker does
            not monitor hardware.
        record_file: name of the tracker's record.
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
    record_file: str = FILE

    @property
    def record(self) -> Path:
        """The path of the tracker's record."""
        folder = self.folder / "attempts" / str(self.attempt) if self.is_live else self.folder
        return folder / self.record_file

    def flat_config(self) -> dict[str, Any]:
        """The recipe with the facts and the `layout.*` keys.

        wandb's panels read a dot in a key as a step into a mapping, so the layout is there as a mapping too.
        """
        flat = {f"layout.{axis}": degree for axis, degree in self.layout.items()}
        label = self.facts.get("layout.label")
        nested = {**self.layout, **({} if label is None else {"label": label})}
        return {**self.config, **self.facts, **flat, "layout": nested, "attempt": self.attempt}


def open_tracker(config: TrackerConfig, run: TrackedRun, *, warn: Warn) -> Tracker:
    """Start the configured tracker. Only the rank that writes metrics calls this.

    Args:
        config: of the group `tracker`.
        warn: called with one line if the tracker stops with an error.

    Raises:
        ConfigError: a package of the tracker is not installed.
    """
    config.check_installed()
    tracker = config.implementation()
    tracker.start(run, warn=warn)
    return tracker
