"""The ranks of one start of a job over its attempts: how they meet, which are lost, whether they start again.

Before an attempt, rank 0 begins it and publishes its address in a file, and the other ranks poll for it: before this,
no rank knows an address, and every node sees files after some delay.

After an attempt, every rank that waits for the next one leaves a file, so that the next one goes on without ranks on a
lost node. A scheduler needs minutes to notice that a node is lost (in Slurm SlurmdTimeout, 300 s); ranks that leave no
file in a shorter time are taken for lost too. Rank 0 then decides whether they start again, and which of them.

A job puts itself back into the queue if the run did not cause its end; after a lost node it accepts fewer nodes.
"""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import msgspec

from titanlab.checkpoint import Place
from titanlab.data import source
from titanlab.distributed import ALONE, LOG, Ranks, check_host, look_seconds, this_host
from titanlab.errors import ConfigError, TitanlabError
from titanlab.launch import restarts
from titanlab.launch.attempt import conclude, keep_tokenizer, missed_checkpoint
from titanlab.launch.contract import ProcessPlace, launch_of
from titanlab.launch.evidence import note_bad_host, suspect
from titanlab.launch.job import Job, address_of, port_of, say
from titanlab.launch.launchers import default_config
from titanlab.launch.processes import start_worker
from titanlab.launch.restarts import Restart, Restarts, change, reduced
from titanlab.launch.watch import RankWatch, StopCheck, ignore_stop_signals, settle
from titanlab.recipe import Recipe, check_unedited, from_mapping, to_mapping
from titanlab.records import Outcome, OutcomeKind, RunFolder, from_exception, read_optional
from titanlab.system import counted, write_json

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
    """Write the file that the other ranks poll for."""
    # Without an attempt the file is in the run's folder: the next start replaces it.
    folder = run.attempt_folder(meeting.attempt) if meeting.attempt else run.path
    write_json(folder / MEETING_FILE, {"schema": 1, **asdict(meeting)})


def find_meeting(run: RunFolder, start: str) -> Rendezvous | None:
    """The rendezvous of one start of a job; None while rank 0 has not published it."""
    attempts = run.attempts()
    paths = [run.attempt_folder(attempt) / MEETING_FILE for attempt in attempts[-2:]]
    for path in (*paths, run.path / MEETING_FILE):
        # Another version of titanlab may have written the file.
        with contextlib.suppress(msgspec.ValidationError):
            meeting = msgspec.convert(read_optional(path), Rendezvous)
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
    """Say that a rank of the job waits for the attempt after this one; a full disk prevents it."""
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
            gone = {rank for rank in expected if node_of(place, rank) in taken}
            ask_at = time.monotonic() + _ASK_SECONDS
        absent = {rank for rank in expected if not (folder / str(rank)).exists()}
        if absent <= gone or time.monotonic() >= end:
            return _loss(place, absent | gone, gone, seconds)
        if job.signals:
            return Loss()
        time.sleep(_ANSWER_POLL_SECONDS)


def node_of(place: ProcessPlace, rank: int) -> str:
    """The node of a rank; the ranks of a job fill its nodes in order, equally many on each."""
    return place.nodes[min(rank // ranks_per_node(place), len(place.nodes) - 1)]


def ranks_per_node(place: ProcessPlace) -> int:
    """Number of the job's ranks on each node."""
    return max(1, place.ranks.world // max(1, len(place.nodes)))


def _loss(place: ProcessPlace, lost: Collection[int], gone: Collection[int], seconds: float) -> Loss:
    if not lost:
        return Loss()
    per_node = ranks_per_node(place)
    counts = {node: sum(node_of(place, rank) == node for rank in lost) for node in place.nodes}
    nodes = tuple(node for node, count in counts.items() if count == per_node)
    where = [node for node, count in counts.items() if count]
    reason = (
        f"do not answer within {seconds:g} s"
        if set(lost) - set(gone)
        else f"are lost: {place.launcher} has taken {_listed('node', where)} from the job"
    )
    words = f"{_listed('rank', sorted(lost))} on {', '.join(where[:8])} {reason}"
    if len(lost) == 1:
        words = words.replace(" do not answer", " does not answer").replace(" are lost", " is lost")
    return Loss(ranks=tuple(sorted(lost)), nodes=nodes, words=words)


def _listed(noun: str, what: Sequence[object]) -> str:
    shown = ", ".join(str(item) for item in what[:8])
    return f"{noun}{'s' if len(what) > 1 else ''} {shown}" + (f" and {len(what) - 8} more" if len(what) > 8 else "")


# After rank 0 has gone silent, ranks on other nodes wait for the scheduler to notice that its node is lost. Slurm needs
# SlurmdTimeout, which is 300 s by default, and up to a third of it more.
LOST_SECONDS = 900.0
# Seconds between the attempts of two nodes to requeue; the scheduler refuses a second requeue of the same start.
_NEXT_SECONDS = 15.0


def requeue_after(job: Job, outcome: Outcome, *, has_saved: bool, has_lost_nodes: bool = False) -> None:
    """Put a job that was preempted, reached its time limit or lost nodes back into the queue, to resume later."""
    if not job.launcher.can_requeue:
        return
    if has_lost_nodes and outcome.kind is OutcomeKind.NODE_FAIL and not job.signals:
        requeue(job, least_nodes=fewest_nodes(job))
    elif outcome.kind not in (OutcomeKind.PREEMPTED, OutcomeKind.WALLTIME):
        return
    elif outcome.kind is OutcomeKind.WALLTIME and not has_saved:
        say("not put back into the queue: this attempt has saved nothing, and the next one would not either")
    else:
        requeue(job)


def requeue(job: Job, *, least_nodes: int | None = None) -> None:
    """Put a job back into the queue, if its config allows it.

    Args:
        least_nodes: the smallest number of nodes on which it may start again; None: the number that it has now.
    """
    launch, place = job.launch, job.place
    if not launch.get("requeue", False):
        say("not put back into the queue: launch.requeue=false")
        return
    if place.restart >= launch.get("max_requeues", 0):
        say(f"not put back into the queue: it has been {place.restart} times (launch.max_requeues)")
        return
    most = len(place.nodes)
    if least_nodes is None or least_nodes >= most:
        refused, target = job.launcher.requeue(place), "the queue"
    else:
        refused = job.launcher.requeue_on_fewer(place, least=least_nodes, most=most)
        target = f"the queue for {least_nodes} to {most} nodes"
    say(f"not put back into {target}: {refused}" if refused else f"put back into {target}")


def fewest_nodes(job: Job) -> int | None:
    """The smallest number of its nodes on which a job's run can go on under `launch.min_world`; None: only on all."""
    recipe: Recipe = from_mapping(job.config())
    least, ranks = recipe.launch.min_world, ranks_per_node(job.place)
    if least is None:
        return None
    counts = range(1, len(job.place.nodes))
    return next((count for count in counts if reduced(recipe, count * ranks, least) is not None), None)


def survives(job: Job, recipe: Recipe) -> bool:
    """Whether a job goes on without a node that fails: its scheduler does not end it then."""
    return recipe.launch.min_world is not None and len(job.place.nodes) > 1 and job.launcher.can_requeue


def requeue_without_rank_0(job: Job, recipe: Recipe, attempt: int) -> bool:
    """After rank 0 has gone: if its node is lost, put the job back into the queue from a rank on another node.

    A job that survives the loss of a node also survives the loss of the first node, where its batch script ran; then
    nothing else ends the job before its time limit.

    Args:
        attempt: rank 0 has not written its result; if the result appears, rank 0 is alive.
    """
    if not survives(job, recipe):
        return False
    place, end = job.place, time.monotonic() + LOST_SECONDS
    # One rank of each node asks: few questions for the scheduler, and another dead process does no harm.
    asks, lost = place.ranks.rank % ranks_per_node(place) == 0, frozenset[str]()
    while place.nodes[0] not in lost:
        if job.run.result(attempt) is not None or time.monotonic() > end:
            return False
        if job.signals:
            return not asks
        time.sleep(_ASK_SECONDS)
        lost = job.launcher.lost_nodes(place) if asks else lost
    say(f"{place.launcher} has taken {place.nodes[0]} from the job, on which rank 0 was")
    # Lose no time between requeue and setting the range of nodes: after the requeue the scheduler ends this process.
    least_nodes = fewest_nodes(job)
    left = [node for node in place.nodes if node not in lost]
    node = node_of(place, place.ranks.rank)
    time.sleep(_NEXT_SECONDS * left.index(node) if node in left else 0.0)
    requeue(job, least_nodes=least_nodes)
    return True


# Outcomes that a lost rank may have caused.
_WITH_A_LOSS = (OutcomeKind.CRASH, OutcomeKind.HANG, OutcomeKind.OOM, OutcomeKind.NODE_FAIL)
_END_POLL_SECONDS = 2.0
# A rank that was left out ends after this time without a sign of rank 0.
_ALONE_SECONDS = 60.0


class RankGroup:
    """The ranks of one start of a job, as rank 0 sees them.

    Attributes:
        round: number of the attempt in this start, from 0.
        members: ranks of the job that take part; empty: all of them.
    """

    def __init__(self, job: Job, say: Callable[[str], None]) -> None:
        self._job, self.report = job, say
        self._restarts: Restarts | None = None
        self._restart: Restart | None = None
        self._last: int | None = None
        self._left_out: set[int] = set()
        self._loss = Loss()
        self._meeting_place = ("", 0)
        self.round = 0
        self.members: tuple[int, ...] = ()
        self.started_by = job.place.launcher
        self.processes: int | None = job.place.ranks.local_world
        self.checkpoint: Place | None = None

    def next_recipe(self) -> Recipe:
        self._job.check_code()
        recipe = self.recipe()
        self._meeting_place = address_of(self._job.launcher, self._job.place, os.environ), port_of(os.environ)
        if (missed := missed_checkpoint(self._job.run)) is not None:
            self.report(missed)
        return recipe

    def refused(self, error: Exception) -> Outcome:
        outcome = self._job.refused(error, self.config())
        # The other ranks wait for the rendezvous.
        publish_meeting(self._job.run, Rendezvous(start=self._job.round(self.round), attempt=outcome.attempt))
        self._say_end(outcome)
        return outcome

    def attempted(self, attempt: int, recipe: Recipe) -> Outcome:
        job, run, place = self._job, self._job.run, self._job.place
        job.note(attempt)
        if self._restart is not None and self._last is not None:
            restarts.note(run, attempt, self._restart, self._last)
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
            self._remember_host(outcome)
        return outcome

    def _say_end(self, outcome: Outcome) -> None:
        self.report(f"{outcome.kind.value} at step {outcome.step}: {outcome.cause or outcome.kind.meaning}")

    def _remember_host(self, outcome: Outcome) -> None:
        """Remember the host that may have caused an end, except for jobs that can only run on this host."""
        place = self._job.place
        host = suspect(outcome, place.nodes, ranks_per_node=ranks_per_node(place))
        if host is not None and not default_config(place.launcher).runs_here:
            note_bad_host(self._job.run, outcome, host)
            clear = f"`titanlab hosts --clear {host}`"
            self.report(f"{host} is remembered: a later job of this run leaves it out, until {clear}")

    @property
    def has_lost_nodes(self) -> bool:
        """Whether the last attempt has lost a node of the job."""
        return bool(self._loss.nodes)

    def config(self) -> dict[str, Any]:
        """The recipe of the next attempt as plain values, before it is fitted to a job that has become smaller."""
        return self._job.config() if self._restart is None else to_mapping(self._restart.recipe)

    def recipe(self) -> Recipe:
        """The recipe of the next attempt.

        A job that was put back into the queue after the loss of a node may start on fewer nodes: then the same rule
        chooses a smaller layout.

        Raises:
            ConfigError: the recipe is not valid, or no layout fits so few processes.
        """
        if self._restart is not None:
            return self._restart.recipe
        check_unedited(self._job.run)
        recipe: Recipe = from_mapping(self._job.config())
        world, least = self._job.place.ranks.world, recipe.launch.min_world
        if least is None or world >= recipe.layout.world:
            return recipe
        smaller = reduced(recipe, world, least)
        if smaller is None:
            rule = f"has {recipe.layout.world} processes, the job has {world}, and no layout of at least {least} fits"
            cure = f"cancel the job, and submit the run again: titanlab resume {self._job.run.path}"
            raise ConfigError("launch.min_world", least, rule, cure)
        self.members = tuple(range(smaller.layout.world)) if smaller.layout.world < world else ()
        self.report(f"the job has {world} processes: {change(recipe, smaller)}")
        return smaller

    def called(self, outcome: Outcome, recipe: Recipe) -> Outcome:
        """Find out which ranks are lost after an attempt. Returns its outcome: `node_fail` if a node of it is lost.

        Only a job that may become smaller waits for its ranks' answers; the scheduler or other ranks end any other job.
        """
        self._loss = Loss()
        if self._job.signals or not self._calls(recipe) or outcome.kind not in _WITH_A_LOSS:
            return outcome
        loss = self._loss = lost_ranks(self._job, outcome.attempt, known=self._left_out)
        self._left_out |= set(loss.ranks)
        members = self.members or tuple(range(self._job.place.ranks.world))
        lost = [number for number, rank in enumerate(members) if rank in loss.ranks]
        if not lost or not loss.nodes or outcome.kind is OutcomeKind.OOM:
            return outcome
        cause = f"{loss.words}; {outcome.cause}" if outcome.cause else loss.words
        outcome = replace(
            outcome, kind=OutcomeKind.NODE_FAIL, rank=lost[0], cause=cause, traceback=None, exit_code=None
        )
        self._job.run.write_result(outcome)
        return outcome

    def _calls(self, recipe: Recipe) -> bool:
        return bool(recipe.launch.restarts) and recipe.launch.min_world is not None

    def goes_on_after(self, outcome: Outcome, recipe: Recipe) -> bool:
        """Decide whether the group starts again after an attempt, and tell the other ranks if it does not."""
        if not recipe.launch.restarts:
            return False
        if self._restarts is None:
            # The task of rank 0 writes the records, so rank 0 cannot be left out.
            self._restarts = Restarts(self._job.run, recipe.launch, fixed=(0,))
        world = self._job.place.ranks.world
        members = self.members or tuple(range(world))
        lost = self._loss.words if set(self._loss.ranks) & set(members) else ""
        restart, why_not = None, ""
        if not self._job.signals:
            usable = world - len(self._left_out) if self._calls(recipe) else None
            restart, why_not = self._restarts.after(outcome, recipe, lost=lost, usable=usable)
        self.round += 1
        if restart is None:
            if why_not:
                self.report(why_not)
            ended = Rendezvous(start=self._job.round(self.round), reason=why_not or "has ended")
            publish_meeting(self._job.run, ended)
            return False
        self.report(restart.why)
        if restart.left_out is not None:
            self._left_out.add(members[restart.left_out])
        if restart.left_out is not None or restart.lost:
            left = [rank for rank in range(world) if rank not in self._left_out]
            self.members = tuple(left[: restart.recipe.layout.world])
        self._restart, self._last = restart, outcome.attempt
        return True


def ranks_in(ranks: Ranks, meeting: Rendezvous) -> Ranks:
    """The rank of a process in an attempt; its device, which follows from its rank on its host, stays the same."""
    met = replace(ranks, address=meeting.address, port=meeting.port)
    if not meeting.members:
        return met
    return replace(met, rank=meeting.members.index(ranks.rank), world=len(meeting.members))


def await_end(run: RunFolder, attempt: int) -> Outcome | None:
    """The result of an attempt in which this process has no rank; None if rank 0 died without writing one."""
    alone_since = time.monotonic()
    while (result := run.result(attempt)) is None:
        if run.is_claimed():
            alone_since = time.monotonic()
        elif time.monotonic() - alone_since > _ALONE_SECONDS:
            return None
        time.sleep(_END_POLL_SECONDS)
    return result


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
