"""The contract of a tracker: its config, and the object that takes the metrics. Torch-free."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from titanlab.costs.setting import Setting
    from titanlab.tracker.tracked_run import TrackedRun

Warn = Callable[[str], None]


class TrackerConfig(Protocol):
    """A config of the group `tracker`: a dataclass that inherits from this class."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    kind: str

    @abstractmethod
    def implementation(self) -> Tracker:
        """A tracker that has not been started."""

    def parts(self) -> Mapping[str, TrackerConfig]:
        """The trackers that the config consists of, by name; by default it is one tracker."""
        return {self.kind: self}

    def check(self, setting: Setting) -> None:
        """Check rules that need more of the recipe than the tracker's fields; by default there are none.

        Raises:
            ConfigError: the first rule that is broken.
        """
        return

    def check_installed(self) -> None:
        """Check that the packages of the tracker are installed; by default it needs none.

        Raises:
            ConfigError: a package is not installed.
        """
        return

    def for_rebuild(self, rows: int) -> TrackerConfig | None:
        """The config of a tracker that takes `rows` rows at once and writes files into the run's folder.

        For `titanlab sync --rebuild`. None: the tracker writes no files there, so nothing can be rebuilt.
        """
        return None


class Tracker(Protocol):
    """Sends metrics to another system. No method raises an error of that system or waits for a network.

    The last two methods are for trackers that write files into a run's folder.
    """

    @abstractmethod
    def start(self, run: TrackedRun, *, warn: Warn) -> None:
        """Open the tracker. Returns at once; `warn` is called with one line if the tracker stops with an error."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, Any], *, time: float | None = None) -> None:
        """Log a row of metrics; steps never decrease within an attempt.

        Args:
            time: when the row was measured, in seconds since the epoch; None: now.
        """

    @abstractmethod
    def finish(self, summary: Mapping[str, Any], *, exit_code: int = 0) -> None:
        """Log the run's medians and totals and close the tracker; waits a few seconds at most."""

    def kept_files(self, run: Path) -> frozenset[Path]:
        """The tracker's files or folders in a run's folder, one for each start."""
        return frozenset()

    def put_aside(self, run: Path, paths: Iterable[Path], *, keep: bool) -> None:
        """Move some of `kept_files` to `replaced/` in the run's folder, or remove them."""
        return
