"""One job of a sweep on this host: submitit's controller starts and watches the ranks' processes."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from titanlab.distributed.ranks import MEETING
from titanlab.launch.local.wake import python_environment
from titanlab.launch.submission import Submission, jobs_folder

# The controller counts down to a time at which it would leave its tasks; ranks have watchdogs of their own.
_MINUTES = 10 * 365 * 24 * 60


def start(
    sweep: Path, submission: Submission, index: int, devices: Sequence[str], *, variables: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a run's processes. Returns the controller, which ends when they all have.

    Args:
        devices: accelerators that the job has for itself.
        variables: more of the job's environment.
    """
    from submitit.local.local import start_controller

    environment = {**python_environment(sweep, submission), **variables}
    words = [word for name in MEETING for word in ("-u", name)]
    words += [f"{name}={value}" for name, value in environment.items()]
    command = [sys.executable, *submission.command(sweep, index)]
    # Relative paths of a recipe start where it was submitted.
    shell = ["sh", "-c", 'cd "$0" 2> /dev/null; exec env "$@"', submission.folder, *words, *command]
    folder = _folder(sweep, submission.token, index)
    folder.mkdir(parents=True, exist_ok=True)
    # The executor around it (LocalExecutor) pickles a function, and gives its process to nobody.
    return start_controller(
        folder,
        shlex.join(shell),
        tasks_per_node=submission.shape.processes,
        cuda_devices=",".join(devices),
        timeout_min=_MINUTES,
    )


def controller_of(sweep: Path, token: str, index: int) -> int | None:
    """Process number of a job's controller, by the logs that it has opened; None if there are none."""
    logs = list(_folder(sweep, token, index).glob("*_0_log.out"))
    newest = max(logs, key=lambda path: path.stat().st_mtime, default=None)
    return None if newest is None else int(newest.name.partition("_")[0])


def _folder(sweep: Path, token: str, index: int) -> Path:
    return jobs_folder(sweep) / f"{token}_{index}"
