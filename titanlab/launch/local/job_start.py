"""One job of a sweep on this host: submitit's controller starts the processes of the ranks and watches them."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from titanlab.distributed.ranks import MEETING
from titanlab.launch.local.wake import python_environment
from titanlab.launch.submission import Submission, jobs_folder

_LOG = re.compile(r"[0-9]+_0_log\.out")
# submitit's controller needs a time limit; this one is never reached. Ranks have their own watchdogs.
_MINUTES = 10 * 365 * 24 * 60


def start(
    sweep: Path, submission: Submission, index: int, devices: Sequence[str], *, variables: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start the processes of a run. Returns the controller, which ends when they all have ended.

    Args:
        devices: accelerators for this job alone.
        variables: further environment variables of the job.
    """
    from submitit.local.local import start_controller

    environment = {**python_environment(sweep, submission), **variables}
    words = [word for name in MEETING for word in ("-u", name)]
    words += [f"{name}={value}" for name, value in environment.items()]
    command = [sys.executable, *submission.command(sweep, index)]
    # Relative paths in a recipe are relative to the folder in which it was submitted.
    shell = ["sh", "-c", 'cd "$0" 2> /dev/null; exec env "$@"', submission.folder, *words, *command]
    folder = _folder(sweep, submission.token, index)
    folder.mkdir(parents=True, exist_ok=True)
    # submitit's LocalExecutor would pickle a function, and does not give its process to the caller.
    return start_controller(
        folder,
        shlex.join(shell),
        tasks_per_node=submission.shape.processes,
        cuda_devices=",".join(devices),
        timeout_min=_MINUTES,
    )


def controller_of(sweep: Path, token: str, index: int) -> int | None:
    """The process number of a job's controller, from the names of its logs; None if there are no logs."""
    logs = {path: _LOG.fullmatch(path.name) for path in _folder(sweep, token, index).glob("*_0_log.out")}
    newest = max((path for path, match in logs.items() if match), key=lambda path: path.stat().st_mtime, default=None)
    return None if newest is None else int(newest.name.partition("_")[0])


def _folder(sweep: Path, token: str, index: int) -> Path:
    return jobs_folder(sweep) / f"{token}_{index}"
