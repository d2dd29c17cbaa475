"""Start of the supervisor of a sweep on this host; it lives on when this process ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from titanlab.distributed.ranks import MEETING
from titanlab.launch.local.local_job import local_job
from titanlab.launch.local.supervisor_start import LOG, MOST_STARTS, give_up, note_start, starts_in_vain
from titanlab.launch.submission import Submission, jobs_folder, submissions
from titanlab.records.claim import is_claimed

KIND = "local"
# The lock that the sweep's supervisor holds.
LOCK = ".supervisor"


def local_submissions(sweep: Path) -> list[Submission]:
    """The sweep's submissions to this launcher, oldest first."""
    return [submission for submission in submissions(sweep) if submission.launcher == KIND]


def has_work(sweep: Path) -> bool:
    """Whether a job of the sweep waits on this host, or has started and not ended."""
    for submission in local_submissions(sweep):
        for index in range(len(submission.runs)):
            job = local_job(sweep, submission.token, index)
            if job is None or job.state in ("starting", "running"):
                return True
    return False


def wake(sweep: Path) -> bool:
    """Start the sweep's supervisor if there is work and none runs. Returns whether it was started.

    A running supervisor reads new submissions: before it ends, it claims the sweep and looks for them once more. After
    several that have ended before they started a job, none is started, and the jobs that wait have failed.
    """
    if is_claimed(sweep, file=LOCK) or not has_work(sweep):
        return False
    submitted = local_submissions(sweep)
    in_vain = starts_in_vain(sweep, submitted)
    if is_claimed(sweep, file=LOCK):
        # One that was started at the same time as the latest one has got the lock meanwhile.
        return False
    if in_vain >= MOST_STARTS:
        give_up(sweep, submitted)
        return False
    newest = submitted[-1]
    jobs_folder(sweep).mkdir(exist_ok=True)
    log = jobs_folder(sweep) / LOG
    size = log.stat().st_size if log.exists() else 0
    command = [sys.executable, "-P", "-m", "titanlab.launch.local.supervisor", str(sweep)]
    environment = {**os.environ, **python_environment(sweep, newest)}
    # The shell ends at once, so that the supervisor has no parent that waits for it, and no terminal.
    shell = subprocess.run(
        ["sh", "-c", 'exec "$@" < /dev/null >> "$0" 2>&1 & echo $!', str(log), *command],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={name: value for name, value in environment.items() if name not in MEETING},
    )
    pid = int(shell.stdout) if shell.stdout.strip().isdecimal() else None
    note_start(sweep, submitted, pid=pid, in_vain=in_vain, log=size)
    return True


def python_environment(sweep: Path, submission: Submission) -> dict[str, str]:
    """Environment variables with which Python imports a submission's snapshot before the user's own PYTHONPATH."""
    own = submission.environment(sweep)
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    others = [path for path in inherited if path and not path.startswith(str(sweep / "code") + os.sep)]
    return {**own, "PYTHONPATH": os.pathsep.join([own["PYTHONPATH"], *others])}
