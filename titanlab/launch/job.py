"""One process of one start of a job: its run, its place, the signals it has received, and checks before it trains."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import titanlab
from titanlab.distributed import ONE_REQUEST_SECONDS, free_port
from titanlab.errors import ConfigError
from titanlab.launch.contract import Launcher, ProcessPlace
from titanlab.launch.launchers import default_config, launcher_named
from titanlab.launch.submission import Submission, submissions
from titanlab.records import Outcome, OutcomeKind, RunFolder, from_exception
from titanlab.system import counted, write_json


@dataclass(frozen=True, kw_only=True)
class Job:
    """One process of one start of a job.

    Attributes:
        launch: config of the launcher with which the job was submitted; the run may have been created with another one.
        changes: groups and values of the run's recipe that this job replaces: another layout.
        code: folder of the code that was submitted; None: no particular code is required.
    """

    run: RunFolder
    place: ProcessPlace
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
    def has_a_task_for_each_rank(self) -> bool:
        """Whether each rank has its own task. If not, this task runs all ranks on this host."""
        return self.place.ranks.world > 1 or not default_config(self.place.launcher).starts_directly

    @property
    def is_hurried(self) -> bool:
        """Whether the user has signalled twice and does not want to wait. Some schedulers repeat their signals."""
        times = [when for _, when in self.signals]
        is_repeated = bool(times) and times[-1] - times[0] > ONE_REQUEST_SECONDS
        return is_repeated and not self.launcher.repeats_signals

    @property
    def launcher(self) -> Launcher:
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

    def note(self, attempt: int) -> None:
        """Write the job.json of an attempt."""
        place = self.place
        facts = {
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
        write_json(self.run.attempt_folder(attempt) / "job.json", facts)

    def check_code(self) -> None:
        """Check that this process runs the code that was submitted, and not sources that were edited later."""
        if self.code is None:
            return
        here = Path(titanlab.__file__).parent
        # Compare the folders themselves: one folder may have several paths.
        with contextlib.suppress(OSError):
            if here.samefile(self.code / "titanlab"):
                return
        rule = f"is not the code of this job, {self.code}: PYTHONPATH was lost or changed on the way to its processes"
        cure = (
            "have launch.container and launch.srun_arguments pass PYTHONPATH on, and launch.environment leave it alone"
        )
        raise ConfigError("titanlab", here, rule, cure)

    def refused(self, error: Exception, config: Mapping[str, Any]) -> Outcome:
        """Record an attempt that cannot begin: such an attempt needs a result too."""
        attempt = self.run.begin_attempt(config, None)
        self.note(attempt)
        outcome = from_exception(error, rank=0, attempt=attempt)
        self.run.write_result(outcome)
        return outcome


def submitted(sweep: Path, token: str) -> Submission:
    """The submission of a job; ConfigError: it does not exist any more."""
    for submission in submissions(sweep):
        if submission.token == token:
            return submission
    # The file of the submission was removed: another job has its runs.
    raise ConfigError("submission", token, f"is not in {sweep}", "submit the sweep again")


def say(text: str) -> None:
    """Print a line to the log of this task."""
    with contextlib.suppress(OSError):
        sys.stdout.write(f"{time.strftime('%H:%M:%S')}  {text}\n")
        sys.stdout.flush()


_LOOPBACK = "127.0.0.1"


def address_of(launcher: Launcher, place: ProcessPlace, environ: Mapping[str, str]) -> str:
    """The address under which all ranks reach rank 0, which is this process: MASTER_ADDR, or the launcher's."""
    address = environ.get("MASTER_ADDR")
    if address:
        return address
    if len(place.nodes) <= 1:
        return _LOOPBACK
    for name in launcher.addresses(place, environ):
        try:
            socket.getaddrinfo(name, None)
        except OSError:
            continue
        return name
    rule = f"the first node, {place.nodes[0]}, has no address that this host can resolve"
    raise ConfigError("MASTER_ADDR", None, rule, "set MASTER_ADDR in launch.environment")


def port_of(environ: Mapping[str, str]) -> int:
    """The port of rank 0: MASTER_PORT, or one that is free."""
    port = environ.get("MASTER_PORT")
    if port:
        if not port.isdecimal() or not 0 < int(port) < 65_536:
            raise ConfigError("MASTER_PORT", port, "is no port", "try MASTER_PORT=29500, or unset it")
        return int(port)
    return free_port()


_LOOK_SECONDS = 1.0


def claim_run(
    run: RunFolder, stack: contextlib.ExitStack, *, seconds: float, is_ending: Callable[[], bool]
) -> str | None:
    """Claim the run until the stack closes.

    Args:
        is_ending: whether this process must end, so that it stops waiting.

    Returns:
        None if this process has the claim; otherwise, after the wait, a message that names the other process.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            patience = max(0.0, min(_LOOK_SECONDS, end - time.monotonic()))
            stack.enter_context(run.claim(patience_seconds=patience))
        except ConfigError as error:
            if is_ending() or time.monotonic() >= end:
                return error.rule
        else:
            return None
