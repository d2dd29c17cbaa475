"""What titanlab asks of a tracker: of its config, and of what takes the metrics. Torch-free."""

from __future__ import annotations

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

    def implementation(self) -> Tracker:
        """A tracker that has not been started."""
        ...

    def check(self, setting: Setting) -> None:
        """Check rules that reach beyond the tracker's own fields; by default there are none.

        Raises:
            ConfigError: the first rule that is broken.
        """
        return

    def check_installed(self) -> None:
        """Check that this environment has what the tracker needs; by default it needs nothing.

        Raises:
            ConfigError: a package is not installed.
        """
        return

    def for_rebuild(self, rows: int) -> TrackerConfig | None:
        """The config of a tracker that takes so many rows at once and keeps them in the run's folder.

        For `titanlab sync --rebuild`. None: the tracker keeps no files there, and nothing can be rebuilt.
        """
        return None


class Tracker(Protocol):
    """Sends metrics elsewhere. No method raises for trouble of its own, and none waits for a network.

    Bound to its config. The last two methods are for trackers that keep files of their own in a run's folder.
    """

    def start(self, run: TrackedRun, *, warn: Warn) -> None:
        """Open it. Returns at once; `warn` is called with one line if the tracker has to give up."""
        ...

    def log(self, step: int, metrics: Mapping[str, Any], *, time: float | None = None) -> None:
        """Hand over a row; steps never decrease within an attempt.

        Args:
            time: when the row was measured, in seconds since the epoch; None: now.
        """
        ...

    def finish(self, summary: Mapping[str, Any], *, exit_code: int = 0) -> None:
        """Close it with the run's medians and totals; waits a few seconds at most."""
        ...

    def kept_files(self, run: Path) -> frozenset[Path]:
        """The tracker's files or folders in a run's folder, one for each start."""
        return frozenset()

    def put_aside(self, run: Path, paths: Iterable[Path], *, keep: bool) -> None:
        """Move some of `kept_files` to `replaced/` in the run's folder, or remove them."""
        return
