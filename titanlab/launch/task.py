"""The program of each task of a job: `python -m titanlab.launch.task SWEEP TOKEN [INDEX]`.

A job of one host has one task, which runs all ranks as `titanlab train` does. Otherwise each rank has a task, which
starts the rank's worker as a child process and watches it. Rank 0 also claims the run, begins the attempt, publishes
its address, and makes sure that there is a result. Without INDEX, the index of the job in its array is used.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from titanlab.checkpoint import checkpoints_of, latest
from titanlab.distributed import LOG, STOP_SIGNALS, held_signals
from titanlab.errors import TitanlabError
from titanlab.launch.attempt import close_earlier, make_attempts, with_progress
from titanlab.launch.contract import launch_of
from titanlab.launch.execute import RanksHere
from titanlab.launch.group import (
    RankGroup,
    Rendezvous,
    answer_call,
    await_end,
    await_meeting,
    publish_meeting,
    requeue,
    requeue_after,
    requeue_without_rank_0,
    survives,
    watched,
)
from titanlab.launch.job import Job, claim_run, say, submitted
from titanlab.launch.launchers import launcher_named
from titanlab.launch.watch import RESULT_SECONDS, StopCheck, await_result
from titanlab.recipe import from_mapping
from titanlab.records import Outcome, OutcomeKind, open_run
from titanlab.system import Console, disk_fault

CLAIM_SECONDS = 3.0
# Seconds after a requeue: the processes of the last start may need a moment to end.
CLAIM_AGAIN_SECONDS = 30.0
# If their node is dead, a file server keeps its locks for a lease (90 s on NFS) and a grace period.
CLAIM_DEAD_SECONDS = 150.0
# After this time without a result, ranks of a job that survives the loss of a node ask whether rank 0 is lost.
ALONE_SECONDS = 30.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one rank. Returns the exit code of the outcome, so that the scheduler recognises a failure."""
    folder, token, *rest = sys.argv[1:] if arguments is None else arguments
    with held_signals(STOP_SIGNALS, is_impatient=False) as signals:
        try:
            submission = submitted(Path(folder), token)
            place = launcher_named(submission.launcher).place_in(os.environ)
            index = int(rest[0]) if rest else place.index or 0
            run = open_run(Path(folder) / submission.runs[index])
            job = Job(
                run=run,
                place=place,
                token=token,
                index=index,
                launch=submission.launch,
                changes=submission.changes.get(run.path.name, {}),
                code=Path(folder) / submission.code,
                signals=signals,
            )
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
        refused = claim_run(job.run, stack, seconds=seconds, is_ending=lambda: bool(job.signals))
        if refused is not None and not goes_on:
            # Another job works on this run: do not repeat its work.
            say(f"{job.run.path.name} {refused}: nothing is done twice")
            return _nothing_to_do(job, refused)
        if refused is not None:
            # The claim belongs to an earlier start of this job, which is dead: no other job will continue the run.
            say(f"{job.run.path.name} {refused}, from an earlier start of this job")
            if not job.signals:
                requeue(job)
            return _nothing_to_do(job, refused, code=OutcomeKind.NODE_FAIL.exit_code)
        if job.is_done():
            return _nothing_to_do(job, "is done")
        if not job.has_a_task_for_each_rank and (by := job.run.asked_to_cancel()) is not None:
            outcome = Outcome(kind=OutcomeKind.CANCELLED, attempt=0, cause=f"{by} before it started")
            job.run.write_result(with_progress(job.run, outcome))
            return _exit_code(outcome)
        try:
            # All tasks of an earlier start may have been killed at once, with their node.
            close_earlier(job.run)
        except TitanlabError as error:
            say(f"error: {error}")
            return _nothing_to_do(job, str(error), code=error.exit_code)
        before = latest(checkpoints_of(job.run))
        group = _group(job, stack)
        outcome = make_attempts(job.run, group)
        has_saved = latest(checkpoints_of(job.run)) != before
        requeue_after(job, outcome, has_saved=has_saved, has_lost_nodes=group.has_lost_nodes)
    return _exit_code(outcome)


def _group(job: Job, stack: contextlib.ExitStack) -> RankGroup | RanksHere:
    """The ranks of a claimed run."""
    if job.has_a_task_for_each_rank:
        return RankGroup(job, say)
    # Rank 0 has no terminal.
    os.environ[LOG] = str(job.run.logs / "rank-0.log")
    console = stack.enter_context(Console())
    return RanksHere(job.run, None, None, console, started_by=job.place.launcher, job=job)


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
            outcome = await_end(job.run, meeting.attempt)
        else:
            stop = StopCheck(job, signal_seconds=launch_of(recipe).signal_seconds)
            code = watched(job, recipe, meeting, stop)
            # Wait for the result: when a rank leaves earlier, the scheduler may end rank 0, which writes it.
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


if __name__ == "__main__":
    sys.exit(main())
