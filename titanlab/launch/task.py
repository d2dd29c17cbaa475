"""The program of each task of a job: `python -m titanlab.launch.task SWEEP TOKEN [INDEX]`.

A job of one host has one task, which runs all ranks as `titanlab train` does. Otherwise each rank has a task, which
starts the rank's worker as a child process and watches it. Rank 0 also claims the run, begins the attempt, publishes
its address, and makes sure that there is a result. Without INDEX, the index of the job in its array is used.

A job puts itself back into the queue if the run did not cause its end; after the loss of a node it accepts fewer nodes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from titanlab.checkpoint import checkpoints_of, latest
from titanlab.distributed import LOG, STOP_SIGNALS, held_signals
from titanlab.errors import ConfigError, TitanlabError
from titanlab.launch.attempt import close_earlier, reduced, with_progress
from titanlab.launch.contract import launch_of
from titanlab.launch.execute import Attempts
from titanlab.launch.job import Job, Rendezvous, answer_call, await_meeting, publish_meeting, submitted
from titanlab.launch.launchers import launcher_named
from titanlab.launch.watch import RESULT_SECONDS, StopCheck, await_result, say, watched
from titanlab.recipe import Recipe, from_mapping
from titanlab.records import Outcome, OutcomeKind, open_run
from titanlab.system import Console, disk_fault

CLAIM_SECONDS = 3.0
# How long to try to claim the run after a requeue: the processes of the last start may need a moment to end.
CLAIM_AGAIN_SECONDS = 30.0
# If the node of the last start is dead, a file server keeps the locks for a lease (90 s on NFS) and a grace period.
CLAIM_DEAD_SECONDS = 150.0
_CLAIM_LOOK_SECONDS = 0.2
# After this time without a result, ranks of a job that survives the loss of a node ask whether rank 0 is lost.
ALONE_SECONDS = 30.0
# A rank that was left out ends if rank 0 shows no sign of life for this time.
_LEFT_OUT_SECONDS = 60.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one rank. Returns the exit code of the outcome, so that the scheduler recognises a failure."""
    folder, token, *rest = sys.argv[1:] if arguments is None else arguments
    with held_signals(STOP_SIGNALS, is_impatient=False) as signals:
        try:
            submission = submitted(Path(folder), token)
            place = launcher_named(submission.launcher).place_in(os.environ)
            index = int(rest[0]) if rest else place.index or 0
            run = open_run(Path(folder) / submission.runs[index])
            job = Job(run=run, place=place, submission=submission, index=index, signals=signals)
            if job.leads and place.index is not None and not place.restart and len(submission.runs) > 1:
                name = submission.job_name(Path(folder).name, index)
                # In a separate thread: a busy controller answers late.
                threading.Thread(target=job.launcher.name_job, args=(place, name), name="job-name", daemon=True).start()
            return _lead(job) if job.leads else _follow(job)
        except TitanlabError as error:
            say(f"error: {error}")
            return error.exit_code
        except OSError as error:
            fault = disk_fault(error)
            if fault is None:
                raise
            say(f"error: {fault}")
            return OutcomeKind.CRASH.exit_code


def _lead(job: Job) -> int:
    """Run rank 0, which writes the records."""
    if job.is_done():
        return _nothing_to_do(job, "is done")
    goes_on = job.goes_on
    with contextlib.ExitStack() as stack:
        seconds = CLAIM_DEAD_SECONDS if goes_on else CLAIM_AGAIN_SECONDS if job.place.restart else CLAIM_SECONDS
        refused = _claimed(job, stack, seconds)
        if refused is not None:
            why = ", from an earlier start of this job" if goes_on else ": nothing is done twice"
            say(f"{job.run.path.name} {refused}{why}")
            if goes_on and not job.signals:
                # The earlier start is dead: no other job will continue the run.
                requeue(job)
            return _nothing_to_do(job, refused, code=OutcomeKind.NODE_FAIL.exit_code if goes_on else 0)
        if job.is_done():
            return _nothing_to_do(job, "is done")
        if not job.has_a_task_for_each_rank and (by := job.run.asked_to_cancel()) is not None:
            outcome = Outcome(kind=OutcomeKind.CANCELLED, attempt=0, cause=f"{by} before it started")
            job.run.write_result(with_progress(job.run, outcome))
            return _exit_code(outcome)
        try:
            # All tasks of an earlier start may have been killed at once, so that its attempt has no result yet.
            close_earlier(job.run)
        except TitanlabError as error:
            say(f"error: {error}")
            return _nothing_to_do(job, str(error), code=error.exit_code)
        console = None
        if not job.has_a_task_for_each_rank:
            # Without a terminal, rank 0 writes to a log, as other ranks do.
            os.environ[LOG] = str(job.run.logs / "rank-0.log")
            console = stack.enter_context(Console())
        attempts = Attempts(job.run, console, job=job)
        before = latest(checkpoints_of(job.run))
        outcome = attempts.make()
        has_saved = latest(checkpoints_of(job.run)) != before
        requeue_after(job, outcome, has_saved=has_saved, has_lost_nodes=attempts.has_lost_nodes)
    return _exit_code(outcome)


def _claimed(job: Job, stack: contextlib.ExitStack, seconds: float) -> str | None:
    """Claim the run until the stack closes. Returns who has it, after the wait or a signal; None: this process."""
    end = time.monotonic() + seconds
    while True:
        try:
            stack.enter_context(job.run.claim())
        except ConfigError as error:
            # A scheduler soon kills a job that it has told to end.
            if job.signals or time.monotonic() >= end:
                return error.rule
            time.sleep(_CLAIM_LOOK_SECONDS)
        else:
            return None


def _nothing_to_do(job: Job, reason: str, *, code: int = 0) -> int:
    """Tell the other ranks that there will be no attempt. Returns the exit code."""
    publish_meeting(job.run, Rendezvous(start=job.start, reason=reason))
    return code


def _follow(job: Job) -> int:
    """Run any other rank: join the attempts that rank 0 begins."""
    if job.is_done():
        return 0
    code, recipe = 0, None
    for number in itertools.count():
        try:
            meeting = await_meeting(job.run, job.round(number), ranks=job.place.ranks)
        except TitanlabError:
            if recipe is None or not requeue_without_rank_0(job, recipe, job.run.newest_attempt() + 1):
                raise
            return OutcomeKind.NODE_FAIL.exit_code
        if meeting.reason:
            say(f"{job.run.path.name} {meeting.reason}{'' if number else ': nothing is done twice'}")
            return code
        if not meeting.port:
            outcome = await_result(job.run, meeting.attempt, job.place.ranks.world)
            return 1 if outcome is None else _exit_code(outcome)
        recipe = from_mapping(job.run.config(meeting.attempt))
        if meeting.members and job.place.ranks.rank not in meeting.members:
            code = 0
            say(f"{job.run.path.name}: this rank is left out of attempt {meeting.attempt}")
            seconds = _LEFT_OUT_SECONDS
            outcome = await_result(job.run, meeting.attempt, job.place.ranks.world, seconds=seconds, while_claimed=True)
        else:
            stop = StopCheck(job, signal_seconds=launch_of(recipe).signal_seconds)
            code = watched(job, recipe, meeting, stop)
            # Wait for the result: if a rank leaves earlier, the scheduler may end rank 0, which writes the result.
            seconds = ALONE_SECONDS if survives(job, recipe) else RESULT_SECONDS
            outcome = await_result(job.run, meeting.attempt, job.place.ranks.world, seconds=seconds)
        if outcome is None:
            if requeue_without_rank_0(job, recipe, meeting.attempt):
                return OutcomeKind.NODE_FAIL.exit_code
            outcome = job.run.result(meeting.attempt)
        code = code if outcome is None else _exit_code(outcome)
        if outcome is None or not recipe.launch.restarts:
            return code
        if recipe.launch.min_world is not None:
            answer_call(job.run, meeting.attempt, job.place.ranks.rank)
    raise AssertionError("rank 0 ends the attempts")


def _exit_code(outcome: Outcome) -> int:
    wrong = OutcomeKind.INFEASIBLE.exit_code
    return wrong if outcome.exit_code == wrong else outcome.kind.exit_code


# If rank 0 does not answer, ranks on other nodes wait this long for the scheduler to notice that rank 0's node is lost.
# Slurm needs SlurmdTimeout, which is 300 s by default, and up to a third of it more.
LOST_SECONDS = 900.0
# Nodes ask for the requeue one after the other, this many seconds apart. If the first request succeeds, the scheduler
# refuses the others.
_NEXT_SECONDS = 15.0
# Seconds between two questions to the scheduler, which many users share.
_ASK_SECONDS = 5.0


def requeue_after(job: Job, outcome: Outcome, *, has_saved: bool, has_lost_nodes: bool = False) -> None:
    """Put a job that was preempted, reached its time limit or lost nodes back into the queue, to resume later."""
    if not job.launcher.can_requeue:
        return
    if has_lost_nodes and outcome.kind is OutcomeKind.NODE_FAIL and not job.signals:
        requeue(job, least_nodes=fewest_nodes(job))
    elif outcome.kind is OutcomeKind.WALLTIME and not has_saved:
        say("not put back into the queue: this attempt has saved nothing, and the next one would not either")
    elif outcome.kind in (OutcomeKind.PREEMPTED, OutcomeKind.WALLTIME):
        requeue(job)


def requeue(job: Job, *, least_nodes: int | None = None) -> None:
    """Put a job back into the queue, if its config allows it.

    Args:
        least_nodes: the smallest number of nodes on which it may start again; None: the number that it has now.
    """
    launch, place = job.submission.launch, job.place
    if not launch.get("requeue", False):
        say("not put back into the queue: launch.requeue=false")
        return
    if place.restart >= launch.get("max_requeues", 0):
        say(f"not put back into the queue: it has been put back {place.restart} times (launch.max_requeues)")
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
    least, ranks = recipe.launch.min_world, job.place.ranks_per_node
    if least is None:
        return None
    counts = range(1, len(job.place.nodes))
    return next((count for count in counts if reduced(recipe, count * ranks, least) is not None), None)


def survives(job: Job, recipe: Recipe) -> bool:
    """Whether a job goes on without a node that fails: its scheduler does not end it then."""
    return recipe.launch.min_world is not None and len(job.place.nodes) > 1 and job.launcher.can_requeue


def requeue_without_rank_0(job: Job, recipe: Recipe, attempt: int) -> bool:
    """If rank 0's node is lost, put the job back into the queue from other nodes. Returns whether the node is lost.

    A job that survives the loss of a node also survives the loss of the first node, where its batch script ran; then
    nothing else ends the job before its time limit.

    Args:
        attempt: the one whose result rank 0 has not written; if the result appears, rank 0 is alive.
    """
    if not survives(job, recipe):
        return False
    place, end = job.place, time.monotonic() + LOST_SECONDS
    # One rank of each node asks: the scheduler gets few questions, and one more dead process does no harm.
    asks, lost = place.ranks.rank % place.ranks_per_node == 0, frozenset[str]()
    while place.nodes[0] not in lost:
        if job.run.result(attempt) is not None or time.monotonic() > end:
            return False
        if job.signals:
            return not asks
        time.sleep(_ASK_SECONDS)
        lost = job.launcher.lost_nodes(place) if asks else lost
    say(f"{place.launcher} has taken {place.nodes[0]} from the job, on which rank 0 was")
    # Compute this before the requeue: after it, the scheduler soon ends this process.
    least_nodes = fewest_nodes(job)
    left = [node for node in place.nodes if node not in lost]
    node = place.node_of(place.ranks.rank)
    time.sleep(_NEXT_SECONDS * left.index(node) if node in left else 0.0)
    requeue(job, least_nodes=least_nodes)
    return True


if __name__ == "__main__":
    sys.exit(main())
