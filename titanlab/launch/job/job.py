"""One process of one start of a job: its run, its place, and the signals that it has received."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from titanlab.distributed.stop import ONE_REQUEST_SECONDS, STOP_SIGNALS, handled
from titanlab.errors import ConfigError
from titanlab.launch.contract import Launcher, Place
from titanlab.launch.launchers import launcher_named
from titanlab.launch.submission import Submission, submissions
from titanlab.records.outcome import OutcomeKind
from titanlab.records.run_folder import RunFolder
from titanlab.system.text import counted


@dataclass(frozen=True, kw_only=True)
class Job:
    """One process of one start of a job.

    Attributes:
        run: the run that the job trains.
        place: of the process.
        token, index: of the submission, and of the run in it.
        launch: config of the launcher with which the job was submitted; the run may have been created with another one.
        changes: groups and values of the run's recipe that this job replaces: another layout.
        code: folder of the code that was submitted; None: no particular code is required.
        signals: number and time of each signal received, oldest first.
    """

    run: RunFolder
    place: Place
    token: str
    index: int
    launch: Mapping[str, Any] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)
    code: Path | None = None
    signals: list[tuple[int, float]] = field(default_factory=list)

    @property
    def start(self) -> str:
        """An identifier that only the processes of this start share."""
        return f"{self.token}/{self.index} {self.place.start}"

    def round(self, number: int) -> str:
        """An identifier of one attempt of this start: 0 is the first, n follows the n-th restart in place."""
        return f"{self.start} #{number}" if number else self.start

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which writes the records."""
        return self.place.ranks.rank == 0

    @property
    def is_hurried(self) -> bool:
        """Whether the user has signalled twice and does not want to wait. Some schedulers repeat their signals."""
        times = [when for _, when in self.signals]
        is_repeated = bool(times) and times[-1] - times[0] > ONE_REQUEST_SECONDS
        return is_repeated and not self.launcher.repeats_signals

    @property
    def launcher(self) -> Launcher:
        """The launcher that has started this process."""
        return launcher_named(self.place.launcher)

    @property
    def goes_on(self) -> bool:
        """Whether the newest attempt at the run belongs to an earlier start of this job."""
        made_by = self.run.job() or {}
        return self.place.restart > 0 and (made_by.get("token"), made_by.get("index")) == (self.token, self.index)

    def is_done(self) -> bool:
        """Whether the run is done already; if so, this is printed."""
        done = self.run.result()
        if done is None or done.kind is not OutcomeKind.DONE:
            return False
        say(f"{self.run.path.name} is done: {counted(done.steps or 0, 'step')}")
        return True

    def config(self) -> dict[str, Any]:
        """The run's recipe for an attempt of this job, as plain values."""
        launch = {"launch": dict(self.launch)} if self.launch else {}
        return {**self.run.config(), **self.changes, **launch}

    def facts(self) -> dict[str, Any]:
        """The content of an attempt's job.json."""
        place = self.place
        return {
            "schema": 1,
            "launcher": place.launcher,
            "job_id": place.job_id,
            "raw_job_id": place.raw_job_id,
            "restart_count": place.restart,
            "nodes": list(place.nodes),
            "token": self.token,
            "index": self.index,
            "started": time.time(),
        }


def submitted(sweep: Path, token: str) -> Submission:
    """The submission of a job.

    Raises:
        ConfigError: it does not exist any more.
    """
    for submission in submissions(sweep):
        if submission.token == token:
            return submission
    # The file of the submission was removed: another job has its runs.
    raise ConfigError("submission", token, f"is not in {sweep}", "submit the sweep again")


@contextlib.contextmanager
def received_signals() -> Iterator[list[tuple[int, float]]]:
    """Collect stop signals in a list instead of dying of them."""
    signals: list[tuple[int, float]] = []

    def handler(number: int, frame: FrameType | None) -> None:
        signals.append((number, time.monotonic()))

    with handled(STOP_SIGNALS, handler):
        yield signals


def say(text: str) -> None:
    """Print a line to the log of this task."""
    with contextlib.suppress(OSError):
        sys.stdout.write(f"{time.strftime('%H:%M:%S')}  {text}\n")
        sys.stdout.flush()
