"""What every tracker does, and how the one rank that writes opens it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from titanlab.options import implementation
from titanlab.tracker.record import FILE

Warn = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """What a tracker is told about a run.

    Attributes:
        id: stable over all attempts, so that a resumed run goes on where it was: digits of its identity.
        name: what people see, such as the run folder's name.
        sweep: the collection that it belongs to.
        folder: of the run; a tracker's own files go there.
        config: the resolved recipe as plain values.
        layout: degree of each axis; also given as flat `layout.*` keys, to group and filter by.
        facts: further flat keys: model parameters, tokens per step, device, the layout's label, the sweep's point …
        tags: model, hardware, precision.
        job_type: `train`, `bench` or `eval`.
        attempt: number of the attempt, from 1.
        resumed_step: what it goes on from.
        is_live: a process trains it now; otherwise its rows come from metrics.jsonl, and no machine is watched.
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


class Tracker(Protocol):
    """Takes metrics elsewhere. No method raises for trouble of its own, and none waits for a network.

    The module of one that keeps files of its own has, for `titanlab sync --rebuild`:

        for_rebuild(config, rows)  the config with which it takes that many rows at once, and keeps them here
        kept_files(folder)         its files or folders in a run's folder, a set of paths
        put_aside(folder, paths, *, keep)  moves such paths to `replaced/`, or removes them
    """

    def start(self, run: TrackedRun) -> None:
        """Open it. Returns at once."""

    def log(self, step: int, metrics: Mapping[str, Any], *, time: float | None = None) -> None:
        """Hand over a row; steps never decrease within an attempt.

        Args:
            time: when the row was measured, in seconds since the epoch; None: now.
        """

    def finish(self, summary: Mapping[str, Any], *, exit_code: int = 0) -> None:
        """Close it with the run's medians and totals; waits a few seconds at most."""


def open_tracker(config: Any, run: TrackedRun, *, warn: Warn) -> Tracker:
    """The configured tracker, started. Only the rank that writes metrics calls this.

    Args:
        config: of the group `tracker`.
        warn: told once if the tracker has to give up.

    Raises:
        ConfigError: its package is not installed.
    """
    tracker: Tracker = implementation(config).build(config, warn=warn)
    tracker.start(run)
    return tracker
