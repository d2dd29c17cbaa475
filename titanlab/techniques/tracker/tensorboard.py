"""tracker=tensorboard: event files under the run's `tensorboard/`."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from titanlab.techniques.tracker.contract import (
    FINISHED,
    OPEN,
    REPLACED,
    Record,
    TrackedRun,
    Tracker,
    Warn,
    write_record,
)
from titanlab.techniques.tracker.trackers_schema import TensorBoard

FOLDER = "tensorboard"
_EVENTS = "events.out.tfevents."


class TensorBoardTracker(Tracker):
    """Writes scalars through torch's SummaryWriter, which writes to disk in its own thread."""

    _warn: Warn

    def __init__(self, config: TensorBoard) -> None:
        self._config = config
        self._writer: Any = None
        self._step = 0
        self._record = Record(kind="tensorboard", folder=FOLDER)
        self._path = Path()

    def start(self, run: TrackedRun, *, warn: Warn) -> None:
        """Open an event file; rows of an earlier attempt after the resumed step are hidden from the charts."""
        self._warn = warn
        self._path = run.record
        self._update_record(id=run.id, attempt=run.attempt)
        with self._guarded():
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(
                log_dir=str(run.folder / FOLDER),
                purge_step=run.resumed_step + 1 if run.attempt > 1 else None,
                # Large enough for many rows at once: add_scalar blocks when the queue is full.
                max_queue=1000,
                flush_secs=self._config.flush_seconds,
            )
            self._step = run.resumed_step
            text = json.dumps(run.flat_config(), indent=2, default=str)
            self._writer.add_text("recipe", "\n".join("    " + line for line in text.splitlines()), self._step)
            self._update_record(state=OPEN)

    def log(self, step: int, metrics: Mapping[str, Any], *, time: float | None = None) -> None:
        if self._writer is None:
            return
        self._step = step
        with self._guarded():
            for name, value in metrics.items():
                if isinstance(value, (int, float)):
                    self._writer.add_scalar(name, value, step, walltime=time)
            self._record = replace(self._record, step=step, rows=self._record.rows + 1)

    def finish(self, summary: Mapping[str, Any], *, exit_code: int = 0) -> None:
        self.log(self._step, {f"summary/{name}": value for name, value in summary.items()})
        if self._writer is None:
            return
        with self._guarded():
            self._writer.close()
            self._update_record(state=FINISHED)
        self._writer = None

    def _update_record(self, **changes: Any) -> None:
        self._record = replace(self._record, **changes)
        write_record(self._path, self._record)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Give up after an error of any kind: an error of a tracker never stops the run."""
        try:
            yield
        except Exception as error:
            self._writer = None
            self._update_record()
            self._warn(f"tensorboard stopped ({type(error).__name__}: {error}); metrics.jsonl goes on")

    def kept_files(self, run: Path) -> frozenset[Path]:
        return frozenset((run / FOLDER).glob(f"{_EVENTS}*"))

    def put_aside(self, run: Path, paths: Iterable[Path], *, keep: bool) -> None:
        aside = run / REPLACED / FOLDER
        for file in paths:
            if keep:
                aside.mkdir(parents=True, exist_ok=True)
                shutil.move(file, aside / file.name)
            else:
                file.unlink(missing_ok=True)
