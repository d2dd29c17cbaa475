"""launch=local: a supervisor on this host starts the runs of a sweep; a single run starts at once."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from titanlab.distributed.ranks import Ranks, number
from titanlab.launch import processes
from titanlab.launch.contract import Failure, JobKey, JobState, LaunchConfig, Launcher, ProcessPlace
from titanlab.launch.evidence import early_end
from titanlab.launch.local.queue import KIND, LOCK, LocalJob, local_job, wake, why_none, why_stopped, write_local_job
from titanlab.launch.submission import JobShape, Submission, check_submitit, has_submitit, jobs_folder
from titanlab.records.claim import is_claimed
from titanlab.records.run_folder import RunFolder


class LocalLauncher(Launcher):
    """Processes on this host."""

    def is_here(self) -> bool:
        return has_submitit()

    def check(self, jobs: Sequence[tuple[LaunchConfig, JobShape]]) -> None:
        check_submitit(KIND)

    def submit(self, sweep: Path, submission: Submission) -> str:
        # The submission's file is the queue, which the supervisor reads.
        return submission.token

    def find(self, sweep: Path, submission: Submission) -> str | None:
        return submission.token

    def states(self, sweep: Path, submitted: Sequence[Submission]) -> dict[JobKey, JobState]:
        lost = why_stopped(sweep) if is_claimed(sweep, file=LOCK) else why_none(sweep)
        return {
            (submission.token, index): _state(sweep, submission, index, lost)
            for submission in submitted
            for index in range(len(submission.runs))
        }

    def cancel(
        self, sweep: Path, jobs: Sequence[tuple[Submission, int]], report: Callable[[str], None], *, is_gentle: bool
    ) -> None:
        for submission, index in jobs:
            _cancel(sweep, submission, index, report)

    def early_end(self, sweep: Path, submission: Submission, index: int) -> str | None:
        job = local_job(sweep, submission.token, index)
        if job is not None and job.cause is not None:
            return job.cause
        return early_end((jobs_folder(sweep) / f"{submission.token}_{index}").glob("*_log.*"))

    def wake(self, sweep: Path) -> bool:
        return wake(sweep)

    def place_in(self, environ: Mapping[str, str]) -> ProcessPlace:
        # Without submitit's controller, the process is a job of its own.
        if environ.get("SUBMITIT_EXECUTOR") == "local" and "SUBMITIT_LOCAL_JOB_ID" in environ:
            job, own_ranks = environ["SUBMITIT_LOCAL_JOB_ID"], _ranks(environ)
        else:
            job, own_ranks = str(os.getpid()), _ranks({})
        return ProcessPlace(launcher=KIND, job_id=job, raw_job_id=job, ranks=own_ranks, nodes=(socket.gethostname(),))

    def start(self, folder: Path, *, attempt: int, world: int, logs: Path) -> list[Failure]:
        return processes.start(folder, attempt=attempt, world=world, logs=logs)


def _ranks(environ: Mapping[str, str]) -> Ranks:
    """The rank of a task of submitit's controller, which runs all ranks on one host."""
    world, rank = number(environ, "SUBMITIT_LOCAL_NTASKS", 1), number(environ, "SUBMITIT_LOCAL_GLOBALID", 0)
    local_rank = number(environ, "SUBMITIT_LOCAL_LOCALID", 0)
    return Ranks(
        rank=rank, world=world, local_rank=local_rank, local_world=world, address="127.0.0.1", port=0, started_by=KIND
    )


def _state(sweep: Path, submission: Submission, index: int, lost: str | None) -> JobState:
    """The state of a job.

    Args:
        lost: why no supervisor can start it; None if one can, or may be able to soon.
    """
    job, run = local_job(sweep, submission.token, index), RunFolder(sweep / submission.runs[index])
    is_claimed_run = run.is_claimed()
    if job is None:
        if is_claimed_run:
            return JobState(state="running", job_id=submission.token)
        return JobState(state="pending", reason=lost, job_id=submission.token)
    elapsed = None if job.started is None else (job.ended or time.time()) - job.started
    if is_claimed_run or job.is_alive(run):
        state = "running"
    elif job.state == "starting":
        # If the supervisor died before the process existed, the next supervisor starts the job.
        state = "running" if is_claimed(sweep, file=LOCK) else "pending"
    else:
        state = "ended"
    return JobState(
        state=state,
        raw=job.state,
        elapsed_seconds=elapsed,
        reason=lost if state == "pending" else None,
        # A job that was cancelled while it waited has been on no host.
        nodes=() if job.started is None else (job.host,),
        job_id=submission.job_id or submission.token,
    )


def _cancel(sweep: Path, submission: Submission, index: int, report: Callable[[str], None]) -> None:
    name = submission.runs[index]
    job, run = local_job(sweep, submission.token, index), RunFolder(sweep / name)
    if job is None or (job.state == "starting" and job.pid is None):
        write_local_job(sweep, submission.token, index, LocalJob(state="cancelled", ended=time.time()))
    elif not job.is_here and not job.is_alive(run):
        # No supervisor will record that this job has ended.
        write_local_job(sweep, submission.token, index, replace(job, state="ended", ended=time.time()))
    elif not job.is_here:
        report(f"{name} runs on {job.host}: cancel it there")
    elif job.is_alive(run) and job.pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(job.pid, signal.SIGTERM)
