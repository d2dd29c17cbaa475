"""One process of one start of a job: what it works on, and the signals that it has received."""

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


@dataclass(frozen=True, kw_only=True)
class Job:
    """One process of one start of a job.

    Attributes:
        run: what it works on.
        place: of the process.
        token, index: of the submission, and the run's index there.
        launch: the launcher's config that it was submitted with; the run may have been made with another one.
        code: folder of the code that it was submitted with; None: any.
        heard: signals that have come and when, oldest first.
    """

    run: RunFolder
    place: Place
    token: str
    index: int
    launch: Mapping[str, Any] = field(default_factory=dict)
    code: Path | None = None
    heard: list[tuple[int, float]] = field(default_factory=list)

    @property
    def start(self) -> str:
        """Shared by the processes of this start, and by no others."""
        return f"{self.token}/{self.index} {self.place.start}"

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which keeps the record."""
        return self.place.ranks.rank == 0

    @property
    def is_hurried(self) -> bool:
        """Whether a person has signalled twice, and does not want to wait. Some schedulers send several signals."""
        numbers = [when for _, when in self.heard]
        is_several = bool(numbers) and numbers[-1] - numbers[0] > ONE_REQUEST_SECONDS
        return is_several and not self.launcher.repeats_signals

    @property
    def launcher(self) -> Launcher:
        """The launcher that has started this process."""
        return launcher_named(self.place.launcher)

    @property
    def goes_on(self) -> bool:
        """Whether the run's newest attempt is of an earlier start of this job."""
        made_by = self.run.job() or {}
        return self.place.restart > 0 and (made_by.get("token"), made_by.get("index")) == (self.token, self.index)

    def is_done(self) -> bool:
        """Whether the run is done already; then that is printed."""
        done = self.run.result()
        if done is None or done.kind is not OutcomeKind.DONE:
            return False
        say(f"{self.run.path.name} is done: {done.steps} steps")
        return True

    def facts(self) -> dict[str, Any]:
        """What an attempt's job.json says."""
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
        ConfigError: there is none any more.
    """
    for submission in submissions(sweep):
        if submission.token == token:
            return submission
    # An intent that was dropped: another job has its runs.
    raise ConfigError("submission", token, f"is not in {sweep}", "submit the sweep again")


@contextlib.contextmanager
def hearing() -> Iterator[list[tuple[int, float]]]:
    """Collect signals that ask for an end, instead of dying of them."""
    heard: list[tuple[int, float]] = []

    def handler(number: int, frame: FrameType | None) -> None:
        heard.append((number, time.monotonic()))

    with handled(STOP_SIGNALS, handler):
        yield heard


def say(text: str) -> None:
    """Print a line into the log of this task."""
    with contextlib.suppress(OSError):
        sys.stdout.write(f"{time.strftime('%H:%M:%S')}  {text}\n")
        sys.stdout.flush()
