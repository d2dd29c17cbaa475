"""The contract of a tracker, and attempts/N/tracker.json, which records the rows a tracker has taken. Torch-free."""

from __future__ import annotations

import contextlib
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from titanlab.costs import OptionConfig
from titanlab.system import parse_json, read_text, write_json

RECORD_SCHEMA = 1
RECORD_FILE = "tracker.json"
# In a run with several trackers, each tracker has its own record, tracker-KIND.json.
_RECORD_FILES = "tracker*.json"
# Folder in a run's folder for the tracker files that a rebuild has replaced.
REPLACED = "replaced"
# States of a tracker: not ready yet; takes rows; has all rows and the summary.
STARTING, OPEN, FINISHED = "starting", "open", "finished"


@dataclass(frozen=True, kw_only=True)
class Record:
    """The content of tracker.json.

    Attributes:
        wanted: the configured mode, `online` or `offline`; None for trackers without modes.
        mode: the mode in use; None before the tracker is ready.
        folder: the folder of the tracker's files, relative to the run's folder; None before the tracker is ready.
        step: of the latest row that the tracker has taken.
        rows: number of rows that the tracker has taken in this attempt.
        left_out: number of rows that were not sent because the tracker could not keep up.
        attempt: number of the attempt, from 1; in a rebuilt record the latest attempt.
        rebuilt: whether the tracker's files were rebuilt from metrics.jsonl.
        updated: time of the last change, in seconds since the epoch.
    """

    kind: str
    state: str = STARTING
    id: str = ""
    wanted: str | None = None
    mode: str | None = None
    folder: str | None = None
    step: int | None = None
    rows: int = 0
    left_out: int = 0
    attempt: int = 1
    rebuilt: bool = False
    updated: float = field(default_factory=time.time)


def file_of(kind: str) -> str:
    """Name of a tracker's record where a run has several trackers."""
    return f"tracker-{kind}.json"


def records_in(folder: Path) -> dict[str, Record]:
    """The records in the folder of an attempt, or of a run, by kind of tracker."""
    records = (read_record(path) for path in sorted(folder.glob(_RECORD_FILES)))
    return {record.kind: record for record in records if record is not None}


def write_record(path: Path, record: Record) -> None:
    """Replace a record; if the disk is full or absent, the record stays as it is."""
    # An error of a tracker never stops the run. Rows that no record counts are taken as missing.
    with contextlib.suppress(OSError):
        write_json(path, {"schema": RECORD_SCHEMA, **asdict(replace(record, updated=time.time()))})


def read_record(path: Path) -> Record | None:
    """Read a record; None if it is missing, its schema differs, or a value has the wrong type."""
    import msgspec

    try:
        value = parse_json(read_text(path))
        return msgspec.convert(value, Record) if value["schema"] == RECORD_SCHEMA else None
    except (OSError, ValueError, LookupError, TypeError, msgspec.ValidationError):
        return None


Warn = Callable[[str], None]


class TrackerConfig(OptionConfig, Protocol):
    """A config of the group `tracker`: a dataclass that inherits from this class."""

    @abstractmethod
    def implementation(self) -> Tracker:
        """A tracker that has not been started."""

    def parts(self) -> Mapping[str, TrackerConfig]:
        """The trackers that the config consists of, by name; by default it is one tracker."""
        return {self.kind: self}

    @property
    def is_written_at_end(self) -> bool:
        """Whether the tracker's files are written from metrics.jsonl after the run's end; no row is logged before."""
        return False

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


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """The description of a run for a tracker.

    Attributes:
        id: digits of the run's identity; the same in all attempts, so that a resumed run continues its charts.
        name: the displayed name, such as the run folder's name.
        folder: of the run; a tracker writes its files into it.
        layout: degree of each axis; `flat_config` has them as `layout.*` keys too, for grouping and filtering.
        facts: further flat keys: model parameters, tokens per step, device, the layout's label, the sweep's point …
        job_type: `train`, `bench` or `eval`.
        resumed_step: the step after which the attempt continues; 0: it starts from the beginning.
        is_live: whether a process trains the run now; otherwise rows come from metrics.jsonl, and the tracker does
            not monitor hardware.
    """

    id: str
    name: str
    sweep: str
    folder: Path
    config: Mapping[str, Any]
    layout: Mapping[str, int]
    facts: Mapping[str, Any] = field(default_factory=dict)
    tags: Sequence[str] = ()
    notes: str | None = None
    job_type: str = "train"
    attempt: int = 1
    resumed_step: int = 0
    is_live: bool = True
    record_file: str = RECORD_FILE

    @property
    def record(self) -> Path:
        folder = self.folder / "attempts" / str(self.attempt) if self.is_live else self.folder
        return folder / self.record_file

    def flat_config(self) -> dict[str, Any]:
        """The recipe with the facts and the `layout.*` keys.

        wandb's panels read a dot in a key as a step into a mapping, so the layout is also a nested mapping.
        """
        flat = {f"layout.{axis}": degree for axis, degree in self.layout.items()}
        label = self.facts.get("layout.label")
        nested = {**self.layout, **({} if label is None else {"label": label})}
        return {**self.config, **self.facts, **flat, "layout": nested, "attempt": self.attempt}


def open_tracker(config: TrackerConfig, run: TrackedRun, *, warn: Warn) -> Tracker:
    """Start the configured tracker. Only the rank that writes metrics calls this.

    Args:
        warn: called with one line if the tracker stops with an error.

    Raises:
        ConfigError: a package of the tracker is not installed.
    """
    config.check_installed()
    tracker = config.implementation()
    tracker.start(run, warn=warn)
    return tracker
