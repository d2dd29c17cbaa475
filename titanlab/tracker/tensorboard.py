"""tracker=tensorboard: event files under the run's `tensorboard/`."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from titanlab.errors import ConfigError
from titanlab.tracker.protocol import TrackedRun, Warn
from titanlab.tracker.record import FINISHED, OPEN, REPLACED, Record, write_record
from titanlab.tracker.tensorboard_schema import TensorBoard

FOLDER = "tensorboard"


class TensorBoardTracker:
    """Writes scalars through torch's SummaryWriter, whose own thread does the writing."""

    def __init__(self, config: TensorBoard, warn: Warn) -> None:
        self._config = config
        self._warn = warn
        self._writer: Any = None
        self._step = 0
        self._record = Record(kind="tensorboard", folder=FOLDER)
        self._path = Path()

    def start(self, run: TrackedRun) -> None:
        """Open an event file; rows of an earlier attempt for later steps are hidden from the charts."""
        self._path = run.record
        self._note(id=run.id, attempt=run.attempt)
        try:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(
                log_dir=str(run.folder / FOLDER),
                purge_step=run.resumed_step + 1 if run.attempt > 1 else None,
                # Room for bursts: add_scalar waits where the queue is full.
                max_queue=1000,
                flush_secs=self._config.flush_seconds,
            )
            self._step = run.resumed_step
            text = json.dumps(run.flat_config(), indent=2, default=str)
            self._writer.add_text("recipe", "\n".join("    " + line for line in text.splitlines()), self._step)
            self._note(state=OPEN)
        except Exception as error:
            self._give_up(error)

    def log(self, step: int, metrics: Mapping[str, Any], *, time: float | None = None) -> None:
        """Add the numbers of a row."""
        if self._writer is None:
            return
        self._step = step
        try:
            for name, value in metrics.items():
                if isinstance(value, (int, float)):
                    self._writer.add_scalar(name, value, step, walltime=time)
            self._record = replace(self._record, step=step, rows=self._record.rows + 1)
        except Exception as error:
            self._give_up(error)

    def finish(self, summary: Mapping[str, Any], *, exit_code: int = 0) -> None:
        """Add the summary under `summary/` and close the file."""
        self.log(self._step, {f"summary/{name}": value for name, value in summary.items()})
        if self._writer is None:
            return
        try:
            self._writer.close()
            self._note(state=FINISHED)
        except Exception as error:
            self._give_up(error)
        self._writer = None

    def _note(self, **changes: Any) -> None:
        self._record = replace(self._record, **changes)
        write_record(self._path, self._record)

    def _give_up(self, error: Exception) -> None:
        # Of whatever kind: a tracker's trouble is never the run's.
        self._writer = None
        self._note()
        self._warn(f"tensorboard stopped ({type(error).__name__}: {error}); metrics.jsonl goes on")


def check(config: TensorBoard) -> None:
    """Hold this environment to have what the tracker needs.

    Raises:
        ConfigError: tensorboard is not installed.
    """
    if importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            "tracker", "tensorboard", "the package is not installed", "pip install tensorboard, or try tracker=jsonl"
        )


def build(config: TensorBoard, *, warn: Warn) -> TensorBoardTracker:
    """The tracker that `config` describes.

    Raises:
        ConfigError: tensorboard is not installed.
    """
    check(config)
    return TensorBoardTracker(config, warn)


def for_rebuild(config: TensorBoard, rows: int) -> TensorBoard:
    """The config for a run's rows all at once."""
    return config


def kept_files(run: Path) -> frozenset[Path]:
    """Event files of all starts."""
    return frozenset((run / FOLDER).glob("events.out.tfevents.*"))


def put_aside(run: Path, files: Iterable[Path], *, keep: bool) -> None:
    """Move event files to `replaced/tensorboard/`, or remove them."""
    aside = run / REPLACED / FOLDER
    for file in files:
        if keep:
            aside.mkdir(parents=True, exist_ok=True)
            shutil.move(file, aside / file.name)
        else:
            file.unlink(missing_ok=True)
