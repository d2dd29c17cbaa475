"""tracker=jsonl, which does nothing, and tracker=[…], several trackers that get the same rows.

An error of one tracker never reaches the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from titanlab.techniques.tracker.contract import TrackedRun, Tracker, TrackerConfig, Warn, file_of


class JsonlTracker(Tracker):
    """Does nothing: the run writes metrics.jsonl and result.json itself."""

    def start(self, run: TrackedRun, *, warn: Warn) -> None:
        """Nothing to open."""

    def log(self, step: int, metrics: Mapping[str, Any], *, time: float | None = None) -> None:
        """The row is in metrics.jsonl already."""

    def finish(self, summary: Mapping[str, Any], *, exit_code: int = 0) -> None:
        """The summary is in result.json already."""


class SeveralTrackers(Tracker):
    """Passes everything on to each tracker.

    Args:
        configs: config of each tracker, by the name of its option.
    """

    _warn: Warn

    def __init__(self, configs: Mapping[str, TrackerConfig]) -> None:
        self._trackers: dict[str, tuple[Tracker, str]] = {}
        for name, config in configs.items():
            self._trackers[name] = config.implementation(), file_of(config.kind)

    def start(self, run: TrackedRun, *, warn: Warn) -> None:
        """Start each tracker, with a record of its own."""
        self._warn = warn
        self._call(lambda tracker, file: tracker.start(replace(run, record_file=file), warn=warn))

    def log(self, step: int, metrics: Mapping[str, Any], *, time: float | None = None) -> None:
        """Log a row to each tracker."""
        self._call(lambda tracker, _: tracker.log(step, metrics, time=time))

    def finish(self, summary: Mapping[str, Any], *, exit_code: int = 0) -> None:
        """Finish each tracker, one after the other."""
        self._call(lambda tracker, _: tracker.finish(summary, exit_code=exit_code))

    def kept_files(self, run: Path) -> frozenset[Path]:
        """The files of all trackers."""
        return frozenset(path for tracker, _ in self._trackers.values() for path in tracker.kept_files(run))

    def put_aside(self, run: Path, paths: Iterable[Path], *, keep: bool) -> None:
        """Move or remove files of the trackers."""
        paths = set(paths)
        for tracker, _ in self._trackers.values():
            tracker.put_aside(run, paths & tracker.kept_files(run), keep=keep)

    def _call(self, action: Callable[[Tracker, str], None]) -> None:
        for name, (tracker, file) in list(self._trackers.items()):
            try:
                action(tracker, file)
            # A tracker of another package may raise anything; the run and the other trackers go on.
            except Exception as error:
                del self._trackers[name]
                self._warn(f"{name} stopped ({type(error).__name__}: {error}); metrics.jsonl goes on")
