"""One start of a job: one of its processes, how its ranks meet, and which ranks are lost.

Rank 0 begins an attempt and publishes its address in a file. The other ranks cannot know the address earlier: they poll
for the file. On a shared file system, a file may appear on other nodes after some delay.

After an attempt, every rank that waits for the next attempt leaves a file. A rank without a file is taken for lost, and
the next attempt goes on without it. A scheduler alone would need minutes to notice that a node is lost (in Slurm
SlurmdTimeout, 300 s). Rank 0 then decides whether the ranks start again, and which of them.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

import titanlab
from titanlab.distributed import ALONE, ONE_REQUEST_SECONDS, Ranks, free_port, look_seconds
from titanlab.errors import ConfigError, TitanlabError
from titanlab.launch.contract import Launcher, ProcessPlace
from titanlab.launch.launchers import default_config, launcher_named
from titanlab.launch.submission import Submission, submissions
from titanlab.launch.watch import say
from titanlab.records import Outcome, OutcomeKind, RunFolder, from_exception, read_optional
from titanlab.system import counted, write_json


@dataclass(frozen=True, kw_only=True)
class Job:
    """One process of one start of a job; `index` is the index of its run in the submission."""

    run: RunFolder
    place: ProcessPlace
    submission: Submission
    index: int
    signals: list[tuple[int, float]] = field(default_factory=list)

    @property
    def start(self) -> str:
        """An identifier that only the processes of this start share."""
        return f"{self.submission.token}/{self.index} {self.place.start}"

    def round(self, number: int) -> str:
        """An identifier of one attempt of this start: 0 is the first, n is that after the n-th restart in place."""
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
        """Whether the user has signalled twice and does not want to wait. Repeats by a scheduler do not count."""
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
        own = self.submission.token, self.index
        return self.place.restart > 0 and (made_by.get("token"), made_by.get("index")) == own

    def is_done(self) -> bool:
        """Whether the run is done already; if so, prints a line that says so."""
        done = self.run.result()
        if done is None or done.kind is not OutcomeKind.DONE:
            return False
        say(f"{self.run.path.name} is done: {counted(done.steps or 0, 'step')}")
        return True

    def config(self) -> dict[str, Any]:
        """The run's recipe for an attempt of this job, as plain values.

        Its launcher and its layout may differ from those with which the run was created.
        """
        submission = self.submission
        launch = {"launch": dict(submission.launch)} if submission.launch else {}
        return {**self.run.config(), **submission.changes.get(self.run.path.name, {}), **launch}

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
            "token": self.submission.token,
            "index": self.index,
            "started": time.time(),
        }
        write_json(self.run.attempt_folder(attempt) / "job.json", facts)

    def check_code(self) -> None:
        """Check that this process runs the code that was submitted, and not sources that were edited later."""
        here, code = Path(titanlab.__file__).parent, self.run.path.parent / self.submission.code
        # Compare the folders themselves: one folder may have several paths.
        with contextlib.suppress(OSError):
            if here.samefile(code / "titanlab"):
                return
        rule = f"is not the code of this job, {code}: PYTHONPATH was lost or changed on the way to its processes"
        cure = "have launch.container and launch.srun_arguments pass PYTHONPATH on"
        raise ConfigError("titanlab", here, rule, f"{cure}, and launch.environment leave it alone")

    def refused(self, error: Exception, config: Mapping[str, Any]) -> Outcome:
        """Record an attempt that cannot begin: such an attempt needs a result too."""
        attempt = self.run.begin_attempt(config, None)
        self.note(attempt)
        outcome = from_exception(error, rank=0, attempt=attempt)
        self.run.write_result(outcome)
        return outcome


def submitted(sweep: Path, token: str) -> Submission:
    """The submission of a job; ConfigError: its file was removed, so that another job has its runs."""
    for submission in submissions(sweep):
        if submission.token == token:
            return submission
    raise ConfigError("submission", token, f"is not in {sweep}", "submit the sweep again")


def address_of(launcher: Launcher, place: ProcessPlace, environ: Mapping[str, str]) -> str:
    """The address under which all ranks reach rank 0, which is this process: MASTER_ADDR, or the launcher's."""
    address = environ.get("MASTER_ADDR")
    if address:
        return address
    if len(place.nodes) <= 1:
        return "127.0.0.1"
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
            raise ConfigError("MASTER_PORT", port, "is not a port", "try MASTER_PORT=29500, or unset it")
        return int(port)
    return free_port()


MEETING_FILE = "rendezvous.json"
# Ranks wait this long for rank 0's file: the nodes of a job start together, except after a slow prologue.
WAIT_SECONDS = 600.0
_MOST_LOOK_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Where the ranks of one start of a job meet.

    Attributes:
        start: identifies the start of the job, and the attempt in it; see `Job.round`.
        attempt: the number of the attempt that rank 0 has begun; 0: it has begun none, for the `reason`.
        address, port: where rank 0 listens; port 0: the attempt has ended already.
        members: ranks of the job that take part, in the order of their ranks in the attempt; empty: all of them.
    """

    start: str
    attempt: int = 0
    address: str = ""
    port: int = 0
    reason: str = ""
    members: tuple[int, ...] = ()


def publish_meeting(run: RunFolder, meeting: Rendezvous) -> None:
    """Write the file for which the other ranks poll, into the attempt's folder; without an attempt, into the run's."""
    folder = run.attempt_folder(meeting.attempt) if meeting.attempt else run.path
    write_json(folder / MEETING_FILE, {"schema": 1, **asdict(meeting)})


def find_meeting(run: RunFolder, start: str) -> Rendezvous | None:
    """The rendezvous of one start of a job; None while rank 0 has not published it."""
    for folder in (*map(run.attempt_folder, run.attempts()[-2:]), run.path):
        # Another version of titanlab may have written the file.
        with contextlib.suppress(msgspec.ValidationError):
            meeting = msgspec.convert(read_optional(folder / MEETING_FILE), Rendezvous)
            if meeting.start == start:
                return meeting
    return None


def await_meeting(run: RunFolder, start: str, *, ranks: Ranks = ALONE, seconds: float = WAIT_SECONDS) -> Rendezvous:
    """Wait for the rendezvous of one start of a job; polls less and less often, because all ranks of a large job poll.

    Raises:
        TitanlabError: rank 0 does not publish it in time.
    """
    begin = time.monotonic()
    least = look_seconds(ranks.world, is_first=ranks.local_rank == 0)
    while (meeting := find_meeting(run, start)) is None:
        waited = time.monotonic() - begin
        if waited > seconds:
            where = run.path / "attempts"
            raise TitanlabError(f"rank 0 of this job has begun no attempt in {where} within {seconds:g} s; see its log")
        time.sleep(max(least, min(_MOST_LOOK_SECONDS, waited / 10)))
    return meeting


ANSWERS = "ready"
# Time for the ranks' files: after the result a rank ends its worker within 30 s; its file may appear 10 s later.
ANSWER_SECONDS = 60.0
_ANSWER_POLL_SECONDS = 0.5
# Seconds between two questions to the scheduler, which many users share.
_ASK_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Loss:
    """The ranks of a job that are lost.

    Attributes:
        nodes: the nodes whose ranks are all lost.
        words: one clause for people; empty if no rank is lost.
    """

    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    words: str = ""


def answer_call(run: RunFolder, attempt: int, rank: int) -> None:
    """Leave the file by which a rank says that it waits for the next attempt; does nothing if the disk is full."""
    folder = run.attempt_folder(attempt) / ANSWERS
    with contextlib.suppress(OSError):
        folder.mkdir(exist_ok=True)
        (folder / str(rank)).touch()


def lost_ranks(job: Job, attempt: int, *, known: Collection[int] = (), seconds: float = ANSWER_SECONDS) -> Loss:
    """After an attempt, wait until every rank has answered, or until it is known which ranks are lost.

    Args:
        known: ranks that were lost before; the function neither waits for them nor returns them.
        seconds: after this time, ranks without an answer are lost.
    """
    place, folder = job.place, job.run.attempt_folder(attempt) / ANSWERS
    expected = set(range(place.ranks.world)) - {place.ranks.rank, *known}
    end, ask_at = time.monotonic() + seconds, 0.0
    gone: set[int] = set()
    while True:
        if time.monotonic() >= ask_at:
            # Ask even if all ranks have answered: the scheduler ends the processes of a node that it takes from a job.
            taken = job.launcher.lost_nodes(place)
            gone = {rank for rank in expected if place.node_of(rank) in taken}
            ask_at = time.monotonic() + _ASK_SECONDS
        answered: set[str] = set()
        with contextlib.suppress(OSError):
            # One call of the file system instead of one for each rank.
            answered = set(os.listdir(folder))
        absent = {rank for rank in expected if str(rank) not in answered}
        if absent <= gone or time.monotonic() >= end:
            break
        if job.signals:
            return Loss()
        time.sleep(_ANSWER_POLL_SECONDS)
    lost = absent | gone
    if not lost:
        return Loss()
    counts = {node: sum(place.node_of(rank) == node for rank in lost) for node in place.nodes}
    nodes = tuple(node for node, count in counts.items() if count == place.ranks_per_node)
    where = [node for node, count in counts.items() if count]
    is_one = len(lost) == 1
    if lost - gone:
        reason = f"{'does' if is_one else 'do'} not answer within {seconds:g} s"
    else:
        reason = f"{'is' if is_one else 'are'} lost: {place.launcher} has taken {_listed('node', where)} from the job"
    words = f"{_listed('rank', sorted(lost))} on {', '.join(where[:8])} {reason}"
    return Loss(ranks=tuple(sorted(lost)), nodes=nodes, words=words)


def _listed(noun: str, what: Sequence[object]) -> str:
    shown = ", ".join(str(item) for item in what[:8])
    return f"{noun}{'s' if len(what) > 1 else ''} {shown}" + (f" and {len(what) - 8} more" if len(what) > 8 else "")
