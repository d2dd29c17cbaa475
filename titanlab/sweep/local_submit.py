"""Sweeps on this host: the supervisor is started where there is work, and lives on when this process ends."""

from __future__ import annotations

import os
import subprocess
import sys

from titanlab.distributed.ranks import MEETING
from titanlab.records.claim import is_claimed
from titanlab.sweep import snapshot
from titanlab.sweep.submission import local_job
from titanlab.sweep.sweep_folder import SweepFolder

LOCK = ".supervisor"
LOG = "supervisor.log"


def has_work(folder: SweepFolder) -> bool:
    """Whether a run of the sweep waits for its turn on this host, or runs under nobody's eyes."""
    for submission in folder.submissions():
        if submission.launcher != "local":
            continue
        for index in range(len(submission.runs)):
            job = local_job(folder.path, submission.token, index)
            if job is None or job.state in ("starting", "running"):
                return True
    return False


def wake(folder: SweepFolder) -> bool:
    """Start the sweep's supervisor unless it runs or has nothing to do. Returns whether it was started.

    One that runs sees what has been submitted: before it ends it looks again, while it holds the sweep.
    """
    if is_claimed(folder.path, file=LOCK) or not has_work(folder):
        return False
    code = next(each.code for each in reversed(folder.submissions()) if each.launcher == "local")
    folder.jobs.mkdir(exist_ok=True)
    command = [sys.executable, "-P", "-m", "titanlab.sweep.supervisor", str(folder.path)]
    environment = {**os.environ, **python_environment(folder, code)}
    # The shell ends at once: the supervisor has no parent that waits for it, and no terminal.
    subprocess.run(
        ["sh", "-c", 'exec "$@" < /dev/null >> "$0" 2>&1 &', str(folder.jobs / LOG), *command],
        check=True,
        start_new_session=True,
        env={name: value for name, value in environment.items() if name not in MEETING},
    )
    return True


def python_environment(folder: SweepFolder, code: str) -> dict[str, str]:
    """Variables with which Python runs a snapshot, before whatever else a person has on its path."""
    found = snapshot.environment(folder.path / code)
    there = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    others = [path for path in there if path and not path.startswith(str(folder.code) + os.sep)]
    return {**found, "PYTHONPATH": os.pathsep.join([found["PYTHONPATH"], *others])}
