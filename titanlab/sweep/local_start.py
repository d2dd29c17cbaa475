"""One job of a sweep on this host: submitit's local executor starts a controller, which starts the ranks."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from titanlab.distributed.ranks import MEETING
from titanlab.sweep.enqueue import job_command
from titanlab.sweep.local_submit import python_environment
from titanlab.sweep.submission import Submission
from titanlab.sweep.sweep_folder import SweepFolder

# The controller counts down to a time at which it would leave its tasks; ranks have watches of their own.
_MINUTES = 10 * 365 * 24 * 60


def start(
    folder: SweepFolder, submission: Submission, index: int, devices: Sequence[str], *, variables: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a run's processes. Returns the controller, which ends when they all have.

    Args:
        devices: accelerators that the job has for itself.
        variables: more of the job's environment.
    """
    from submitit.local.local import LocalExecutor

    executor = LocalExecutor(_place(folder, submission.token, index))
    executor.update_parameters(tasks_per_node=submission.shape.processes, timeout_min=_MINUTES)
    environment = {
        **python_environment(folder, submission.code),
        # The executor knows devices by whole numbers only.
        "CUDA_VISIBLE_DEVICES": ",".join(devices),
        **variables,
    }
    words = [word for name in MEETING for word in ("-u", name)]
    words += [f"{name}={value}" for name, value in environment.items()]
    command = [sys.executable, *job_command(folder, submission, index)]
    # Relative paths of a recipe start where it was submitted.
    shell = ["sh", "-c", 'cd "$0" 2> /dev/null; exec env "$@"', submission.folder, *words, *command]
    process: subprocess.Popen[bytes] | None = vars(executor._submit_command(shlex.join(shell)))["_process"]
    assert process is not None
    return process


def controller_of(folder: SweepFolder, token: str, index: int) -> int | None:
    """Process number of a job's controller, by the logs that it has opened; None if there are none."""
    logs = list(_place(folder, token, index).glob("*_0_log.out"))
    newest = max(logs, key=lambda path: path.stat().st_mtime, default=None)
    return None if newest is None else int(newest.name.partition("_")[0])


def _place(folder: SweepFolder, token: str, index: int) -> Path:
    return folder.jobs / f"{token}_{index}"
