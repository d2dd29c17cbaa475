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
import traceback
from collections.abc import Sequence
from pathlib import Path

from titanlab.checkpoint.folders import checkpoints_of, latest
from titanlab.data import source
from titanlab.distributed.host import check_host, this_host
from titanlab.errors import TitanlabError
from titanlab.launch.attempt import begin, close_earlier, conclude, keep_tokenizer, missed_checkpoint, with_progress
from titanlab.launch.contract import launch_of
from titanlab.launch.evidence import note_bad_host, suspect
from titanlab.launch.execute import make_attempts, prepare
from titanlab.launch.group import (
    RankGroup,
    Rendezvous,
    answer_call,
    await_end,
    await_meeting,
    publish_meeting,
    ranks_in,
    requeue,
    requeue_after,
    requeue_without_rank_0,
    survives,
)
from titanlab.launch.job import Job, address_of, check_code, claim_run, port_of, received_signals, say, submitted
from titanlab.launch.launchers import default_config, given_cores, launcher_named
from titanlab.launch.watch import RESULT_SECONDS, Child, RankWatch, StopCheck, await_result, settle
from titanlab.recipe.next_attempt import check_unedited
from titanlab.recipe.recipe import Recipe, from_mapping
from titanlab.records.outcome import Outcome, OutcomeKind, from_exception
from titanlab.records.run_folder import open_run
from titanlab.system.files import disk_fault
from titanlab.system.terminal import Console
from titanlab.system.text import counted

CLAIM_SECONDS = 3.0
# After a requeue: the processes of the last start may need a moment to end.
CLAIM_AGAIN_SECONDS = 30.0
# If their node is dead, a file server keeps its locks for a lease (90 s on NFS) and a grace period.
CLAIM_DEAD_SECONDS = 150.0
# After this time without a result, ranks of a job that survives the loss of a node ask whether rank 0 is lost.
ALONE_SECONDS = 30.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one rank. Returns the exit code of the outcome, so that the scheduler recognises a failure."""
    folder, token, *rest = sys.argv[1:] if arguments is None else arguments
    with received_signals() as signals:
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
                # In a thread of its own: a busy controller answers late.
                threading.Thread(target=job.launcher.name_job, args=(place, name), name="job-name", daemon=True).start()
            if place.ranks.world == 1 and default_config(place.launcher).starts_directly:
                return _run_here(job)
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


def _run_here(job: Job) -> int:
    """Run all ranks of a job on this host."""
    run = job.run
    if job.is_done():
        return 0
    with contextlib.ExitStack() as stack:
        if (refused := claim_run(run, stack, seconds=CLAIM_SECONDS, is_ending=lambda: bool(job.signals))) is not None:
            say(f"{run.path.name} {refused}: nothing is done twice")
            return 0
        if job.is_done():
            return 0
        if (by := run.asked_to_cancel()) is not None:
            outcome = Outcome(kind=OutcomeKind.CANCELLED, attempt=0, cause=f"{by} before it started")
            run.write_result(with_progress(run, outcome))
            return OutcomeKind.CANCELLED.exit_code
        close_earlier(run)
        console = stack.enter_context(Console())
        config = job.config()
        try:
            if job.code is not None:
                check_code(job.code)
            check_unedited(run)
            # A scheduler may have started the process that submitted, not this one.
            (ready,) = prepare([from_mapping(config)], say, started=True, environ={})
        except Exception as error:
            outcome = job.refused(error, config)
        else:
            os.environ["TITANLAB_LOG"] = str(run.logs / "rank-0.log")
            outcome = make_attempts(run, ready.recipe, ready.host, None, console, job=job)
        say(f"{outcome.kind.value} at step {outcome.step}: {outcome.cause or outcome.kind.meaning}")
    return _exit_code(outcome)


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
        before = latest(checkpoints_of(job.run))
        outcome, has_lost_nodes = _attempts(job)
        requeue_after(job, outcome, has_saved=latest(checkpoints_of(job.run)) != before, has_lost_nodes=has_lost_nodes)
    return _exit_code(outcome)


def _remember_host(job: Job, outcome: Outcome) -> None:
    """Remember the host that may have caused an end; a job on this host has no other one to go to."""
    nodes = job.place.nodes
    host = suspect(outcome, nodes, ranks_per_node=job.place.ranks.world // max(1, len(nodes)))
    if host is not None and not default_config(job.place.launcher).runs_here:
        note_bad_host(job.run, outcome, host)
        say(f"{host} is remembered: a later job of this run leaves it out, until `titanlab hosts --clear {host}`")


def _nothing_to_do(job: Job, reason: str, *, code: int = 0) -> int:
    """Tell the other ranks that there will be no attempt. Returns the exit code."""
    publish_meeting(job.run, Rendezvous(start=job.start, reason=reason))
    return code


def _attempts(job: Job) -> tuple[Outcome, bool]:
    """Make attempts at a claimed run, until one of them is the last of this start.

    Returns:
        its outcome, and whether it has lost a node of the job.
    """
    group = RankGroup(job, say)
    while True:
        outcome, recipe = _attempted(job, group)
        outcome = group.called(outcome, recipe)
        say(f"{outcome.kind.value} at step {outcome.step}: {outcome.cause or outcome.kind.meaning}")
        if not group.members:
            # In a smaller group a rank's number does not tell its host.
            _remember_host(job, outcome)
        if not group.goes_on_after(outcome, recipe):
            return outcome, group.has_lost_nodes


def _attempted(job: Job, group: RankGroup) -> tuple[Outcome, Recipe | None]:
    """Make one attempt at a claimed run, until it has a result; no recipe: it could not begin."""
    run, place = job.run, job.place
    config = group.config()
    try:
        if job.code is not None:
            check_code(job.code)
        recipe = group.recipe()
        address = address_of(job.launcher, place, os.environ)
        missed = missed_checkpoint(run)
        if missed is not None:
            say(missed)
        environ = {**os.environ, **given_cores(job.place.launcher, os.environ)}
        attempt = begin(
            run,
            recipe,
            this_host(),
            started_by=place.launcher,
            report=say,
            processes=place.ranks.local_world,
            environ=environ,
        )
    except Exception as error:
        outcome = job.refused(error, config)
        # The other ranks wait for the rendezvous.
        publish_meeting(run, Rendezvous(start=job.round(group.round), attempt=outcome.attempt))
        return outcome, None
    job.note(attempt)
    group.note(attempt)
    members = group.members
    meeting = Rendezvous(
        start=job.round(group.round), attempt=attempt, address=address, port=port_of(os.environ), members=members
    )
    publish_meeting(run, meeting)
    where = ", ".join(place.nodes)
    world = len(members) or place.ranks.world
    say(f"{run.path.name}, attempt {attempt}: {counted(world, 'process', 'processes')} on {where}, job {place.job_id}")
    stop = StopCheck(job, signal_seconds=launch_of(recipe).signal_seconds)
    code = _watched(job, recipe, meeting, stop)
    if run.result(attempt) is None:
        settle(run, attempt, world)
    outcome = run.result(attempt) or conclude(run, attempt, {0: code} if code else {})
    corrected = stop.corrected(outcome)
    if corrected != outcome:
        run.write_result(corrected)
    return corrected, recipe


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
            code = _watched(job, recipe, meeting, stop)
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


def _watched(job: Job, recipe: Recipe, meeting: Rendezvous, stop: StopCheck) -> int:
    """Run this rank's worker until it ends. Returns its exit code; if it failed, the reason is recorded."""
    run, ranks = job.run, ranks_in(job.place.ranks, meeting)
    attempt = run.attempt_folder(meeting.attempt)
    try:
        if job.code is not None:
            check_code(job.code)
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
        child = Child(
            run.path,
            ranks,
            attempt=meeting.attempt,
            config=run.config(meeting.attempt),
            log=run.logs / f"rank-{ranks.rank}.log",
            environment=given_cores(job.place.launcher, os.environ),
        )
    except Exception as error:
        note = from_exception(error, rank=ranks.rank, attempt=meeting.attempt)
        run.write_failure(note)
        if note.traceback:
            traceback.print_exception(error)
        return note.exit_code or 1
    return RankWatch(
        run,
        meeting.attempt,
        child,
        rank=ranks.rank,
        world=ranks.world,
        check_signals=lambda: stop.look(attempt),
        is_hurried=lambda: job.is_hurried,
        is_first=ranks.local_rank == 0,
    ).to_end()


def _exit_code(outcome: Outcome) -> int:
    wrong = OutcomeKind.INFEASIBLE.exit_code
    return wrong if outcome.exit_code == wrong else outcome.kind.exit_code


if __name__ == "__main__":
    sys.exit(main())
