"""launch=local: a supervisor on this host starts the runs of a sweep; a single run starts at once."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from titanlab.distributed.ranks import ALONE
from titanlab.launch import processes
from titanlab.launch.contract import Failure, JobKey, JobState, Launcher, ProcessPlace
from titanlab.launch.local.supervisor import KIND, LocalJob, signal_run, wake, why_idle
from titanlab.launch.submission import Submission
from titanlab.records.run_folder import RunFolder


class LocalLauncher(Launcher):
    """Processes on this host."""

    def submit(self, sweep: Path, submission: Submission) -> str:
        # The submission's file is the queue, which the supervisor reads.
        return submission.token

    def find(self, sweep: Path, submission: Submission) -> str | None:
        return submission.token

    def states(self, sweep: Path, submitted: Sequence[Submission]) -> dict[JobKey, JobState]:
        jobs = [
            LocalJob(submission=submission, index=index)
            for submission in submitted
            for index in range(len(submission.runs))
        ]
        states, idle = {job.key: job.state(sweep) for job in jobs}, why_idle(sweep)
        return {
            key: replace(state, reason=idle) if state.state == "pending" else state for key, state in states.items()
        }

    def cancel(
        self, sweep: Path, jobs: Sequence[tuple[Submission, int]], report: Callable[[str], None], *, is_gentle: bool
    ) -> None:
        # A job that waits does not start: whoever cancels it writes its result.
        for submission, index in jobs:
            name = submission.runs[index]
            if (host := signal_run(RunFolder(sweep / name), signal.SIGINT)) is not None:
                report(f"{name} runs on {host}: cancel it there")

    def wake(self, sweep: Path) -> bool:
        return wake(sweep)

    def place_in(self, environ: Mapping[str, str]) -> ProcessPlace:
        job, ranks = str(os.getpid()), replace(ALONE, started_by=KIND)
        return ProcessPlace(launcher=KIND, job_id=job, raw_job_id=job, ranks=ranks, nodes=(socket.gethostname(),))

    def start(self, folder: Path, *, attempt: int, world: int, logs: Path) -> list[Failure]:
        return processes.start(folder, attempt=attempt, world=world, logs=logs)
