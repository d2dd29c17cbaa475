"""One start of a job: a process of it, how its ranks meet, which are lost, and whether they start again.

Before an attempt, rank 0 begins it and publishes its address in a file, and the other ranks poll for it: before this,
no rank knows an address, and every node sees files after some delay.

After an attempt, every rank that waits for the next one leaves a file, so that the next one goes on without ranks on a
lost node. A scheduler needs minutes to notice that a node is lost (in Slurm SlurmdTimeout, 300 s); ranks that leave no
file in a shorter time are taken for lost too. Rank 0 then decides whether they start again, and which of them.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

import titanlab
from titanlab.data import source
from titanlab.distributed import ALONE, LOG, ONE_REQUEST_SECONDS, Ranks, check_host, free_port, look_seconds, this_host
from titanlab.errors import ConfigError, TitanlabError
from titanlab.launch.attempt import (
    Group,
    change,
    conclude,
    keep_tokenizer,
    missed_checkpoint,
    reduced,
)
from titanlab.launch.contract import Launcher, ProcessPlace, launch_of
from titanlab.launch.evidence import note_bad_host, suspect
from titanlab.launch.launchers import default_config, launcher_named
from titanlab.launch.processes import start_worker
from titanlab.launch.submission import Submission, submissions
from titanlab.launch.watch import RankWatch, StopCheck, ignore_stop_signals, say, settle
from titanlab.recipe import Recipe, check_unedited, from_mapping, to_mapping
from titanlab.records import Outcome, OutcomeKind, RunFolder, from_exception, read_optional
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
        here = Path(titanlab.__file__).parent
        # Compare the folders themselves: one folder may have several paths.
        with contextlib.suppress(OSError):
            if self.code is None or here.samefile(self.code / "titanlab"):
                return
        rule = f"is not the code of this job, {self.code}: PYTHONPATH was lost or changed on the way to its processes"
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
# From the first task's start to rank 0's file: the nodes of a job start together, except after a slow prologue.
WAIT_SECONDS = 600.0
_MOST_LOOK_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Where the ranks of one start of a job meet.

    Attributes:
        start: of the job, with its token; see `Place.start`.
        attempt: the number of the attempt that rank 0 has begun; 0: it has begun none, see `reason`.
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
    """Write the file that the other ranks poll for: in the attempt's folder, or without an attempt in the run's."""
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
# After the result: a rank ends its worker within 30 s, and its file may appear 10 s later on a shared file system.
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
    """Say that a rank of the job waits for the attempt after this one; does nothing if the disk is full."""
    folder = run.attempt_folder(attempt) / ANSWERS
    with contextlib.suppress(OSError):
        folder.mkdir(exist_ok=True)
        (folder / str(rank)).touch()


def lost_ranks(job: Job, attempt: int, *, known: Collection[int] = (), seconds: float = ANSWER_SECONDS) -> Loss:
    """After an attempt, wait until every rank has answered, or until it is known which ranks are lost.

    Args:
        known: ranks that were lost before; this neither waits for them nor returns them.
        seconds: after this time, ranks without an answer are lost.
    """
    place, folder = job.place, job.run.attempt_folder(attempt) / ANSWERS
    expected = set(range(place.ranks.world)) - {place.ranks.rank, *known}
    end, ask_at = time.monotonic() + seconds, 0.0
    gone: set[int] = set()
    while True:
        if time.monotonic() >= ask_at:
            # Also asked when all have answered: the scheduler ends the processes of a node that it has taken away.
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


# Outcomes that a lost rank may have caused.
_WITH_A_LOSS = (OutcomeKind.CRASH, OutcomeKind.HANG, OutcomeKind.OOM, OutcomeKind.NODE_FAIL)


class RankGroup(Group):
    """The ranks of one start of a job, as rank 0 sees them.

    Attributes:
        round: number of the attempt in this start, from 0.
        members: ranks of the job that take part; empty: all of them.
    """

    # Rank 0 cannot be left out: its task writes the records.
    fixed = (0,)

    def __init__(self, job: Job, report: Callable[[str], None]) -> None:
        place = job.place
        super().__init__(job.run, report, started_by=place.launcher, processes=place.ranks.local_world, job=job)
        self.job: Job = job
        self._left_out: set[int] = set()
        self._loss = Loss()
        self._meeting_place = ("", 0)
        self.round = 0
        self.members: tuple[int, ...] = ()

    def next_recipe(self) -> Recipe:
        self.job.check_code()
        recipe = self.recipe()
        self._meeting_place = address_of(self.job.launcher, self.job.place, os.environ), port_of(os.environ)
        if (missed := missed_checkpoint(self.run)) is not None:
            self.report(missed)
        return recipe

    def recipe(self) -> Recipe:
        """The recipe of the next attempt.

        A job that was put back into the queue after the loss of a node may start on fewer nodes: then the same rule
        chooses a smaller layout.

        Raises:
            ConfigError: the recipe is not valid, or no layout fits so few processes.
        """
        if self.restart is not None:
            return self.restart.recipe
        check_unedited(self.run)
        recipe: Recipe = from_mapping(self.job.config())
        world, least = self.job.place.ranks.world, recipe.launch.min_world
        if least is None or world >= recipe.layout.world:
            return recipe
        smaller = reduced(recipe, world, least)
        if smaller is None:
            rule = f"has {recipe.layout.world} processes, the job has {world}, and no layout of at least {least} fits"
            cure = f"cancel the job, and submit the run again: titanlab resume {self.run.path}"
            raise ConfigError("launch.min_world", least, rule, cure)
        self.members = tuple(range(smaller.layout.world)) if smaller.layout.world < world else ()
        self.report(f"the job has {world} processes: {change(recipe, smaller)}")
        return smaller

    def config(self) -> dict[str, Any]:
        """The recipe of the next attempt as plain values, before it is fitted to a job that has become smaller."""
        return self.job.config() if self.restart is None else to_mapping(self.restart.recipe)

    def refused(self, error: Exception) -> Outcome:
        outcome = self.job.refused(error, self.config())
        # The other ranks wait for the rendezvous.
        publish_meeting(self.run, Rendezvous(start=self.job.round(self.round), attempt=outcome.attempt))
        self._say_end(outcome)
        return outcome

    def attempted(self, attempt: int, recipe: Recipe) -> Outcome:
        job, run, place = self.job, self.run, self.job.place
        address, port = self._meeting_place
        meeting = Rendezvous(
            start=job.round(self.round), attempt=attempt, address=address, port=port, members=self.members
        )
        publish_meeting(run, meeting)
        world = len(self.members) or place.ranks.world
        where = f"{counted(world, 'process', 'processes')} on {', '.join(place.nodes)}"
        self.report(f"{run.path.name}, attempt {attempt}: {where}, job {place.job_id}")
        stop = StopCheck(job, signal_seconds=launch_of(recipe).signal_seconds)
        code = watched(job, recipe, meeting, stop)
        if run.result(attempt) is None:
            settle(run, attempt, world)
        outcome = run.result(attempt) or conclude(run, attempt, {0: code} if code else {})
        corrected = stop.corrected(outcome)
        if corrected != outcome:
            run.write_result(corrected)
        outcome = self.called(corrected, recipe)
        self._say_end(outcome)
        if not self.members:
            # In a smaller group the rank's number does not determine its host.
            self.remember_host(outcome)
        return outcome

    def _say_end(self, outcome: Outcome) -> None:
        self.report(f"{outcome.kind.value} at step {outcome.step}: {outcome.cause or outcome.kind.meaning}")

    def remember_host(self, outcome: Outcome) -> None:
        """Remember the host that may have caused an end, except for jobs that can only run on this host."""
        place = self.job.place
        host = suspect(outcome, place.nodes, ranks_per_node=place.ranks_per_node)
        if host is not None and not default_config(place.launcher).runs_here:
            note_bad_host(self.run, outcome, host)
            clear = f"`titanlab hosts --clear {host}`"
            self.report(f"{host} is remembered: a later job of this run leaves it out, until {clear}")

    def called(self, outcome: Outcome, recipe: Recipe) -> Outcome:
        """Find out which ranks are lost after an attempt. Returns its outcome: `node_fail` if a node of it is lost.

        Only a job that may become smaller waits for its ranks' answers; the scheduler or other ranks end any other job.
        """
        self._loss, self.has_lost_nodes, job = Loss(), False, self.job
        if job.signals or not _calls(recipe) or outcome.kind not in _WITH_A_LOSS:
            return outcome
        loss = self._loss = lost_ranks(job, outcome.attempt, known=self._left_out)
        self.has_lost_nodes = bool(loss.nodes)
        self._left_out |= set(loss.ranks)
        members = self.members or tuple(range(job.place.ranks.world))
        lost = [number for number, rank in enumerate(members) if rank in loss.ranks]
        if not lost or not loss.nodes or outcome.kind is OutcomeKind.OOM:
            return outcome
        cause = f"{loss.words}; {outcome.cause}" if outcome.cause else loss.words
        kind = OutcomeKind.NODE_FAIL
        outcome = replace(outcome, kind=kind, rank=lost[0], cause=cause, traceback=None, exit_code=None)
        self.run.write_result(outcome)
        return outcome

    def goes_on_after(self, outcome: Outcome, recipe: Recipe) -> bool:
        if not recipe.launch.restarts:
            return False
        job, world = self.job, self.job.place.ranks.world
        members = self.members or tuple(range(world))
        lost = self._loss.words if set(self._loss.ranks) & set(members) else ""
        why_not: str | None = ""
        if not job.signals:
            usable = world - len(self._left_out) if _calls(recipe) else None
            why_not = self.decided(outcome, recipe, lost=lost, usable=usable)
        self.round += 1
        if why_not is not None:
            # The other ranks wait for the next attempt.
            publish_meeting(self.run, Rendezvous(start=job.round(self.round), reason=why_not or "has ended"))
            return False
        restart = self.restart
        assert restart is not None
        if restart.left_out is not None:
            self._left_out.add(members[restart.left_out])
        if restart.left_out is not None or restart.lost:
            left = [rank for rank in range(world) if rank not in self._left_out]
            self.members = tuple(left[: restart.recipe.layout.world])
        return True


def _calls(recipe: Recipe) -> bool:
    return bool(recipe.launch.restarts) and recipe.launch.min_world is not None


def ranks_in(ranks: Ranks, meeting: Rendezvous) -> Ranks:
    """The rank of a process in an attempt; its device, which follows from its rank on its host, stays the same."""
    met = replace(ranks, address=meeting.address, port=meeting.port)
    if not meeting.members:
        return met
    return replace(met, rank=meeting.members.index(ranks.rank), world=len(meeting.members))


def watched(job: Job, recipe: Recipe, meeting: Rendezvous, stop: StopCheck) -> int:
    """Run this rank's worker until it ends. Returns its exit code; if it failed, the reason is recorded."""
    run, ranks = job.run, ranks_in(job.place.ranks, meeting)
    try:
        job.check_code()
        cluster = recipe.cluster
        check_host(
            this_host(),
            accelerator=cluster.accelerator,
            device=cluster.device,
            processes=ranks.local_world,
            has_own_gpu=ranks.has_own_gpu,
        )
        if job.leads:
            source.prepare(recipe.data, report=say)
            keep_tokenizer(run, recipe)
        log = {LOG: str(run.logs / f"rank-{ranks.rank}.log")}
        config = run.config(meeting.attempt)
        started = start_worker(
            run.path, ranks, meeting.attempt, config=config, variables=log, set_up=ignore_stop_signals
        )
    except Exception as error:
        note = from_exception(error, rank=ranks.rank, attempt=meeting.attempt)
        run.write_failure(note)
        if note.traceback:
            traceback.print_exception(error)
        return note.exit_code or 1
    return RankWatch(run, meeting.attempt, started, ranks, stop).to_end()
