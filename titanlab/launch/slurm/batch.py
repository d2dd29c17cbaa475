"""Submits arrays of jobs: the batch file and the call of sbatch."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titanlab.distributed import MEETING, QUESTIONS
from titanlab.errors import ConfigError
from titanlab.launch.evidence import bad_hosts, host_names
from titanlab.launch.launchers_schema import Slurm
from titanlab.launch.slurm.command import answering_lines
from titanlab.launch.submission import HANDING_OVER, JobShape, Submission, jobs_folder, submission_file

# A longer call of sbatch is ended; then `find` looks whether its jobs are in the queue.
_SBATCH_SECONDS = 120
# srun's --wait, after the first task has ended: a rank that ended well may wait for others that still save.
_WAIT_SECONDS = 600
# A line of the preamble that fails ends the job, as the run would not have what the line was to provide. A line of a
# file that the preamble sources may fail.
_STOP_AT_FAILURE = (
    "trap 'code=$?; if [ ${#BASH_SOURCE[@]} -eq 1 ]; then "
    'echo "error: launch.preamble: exit code $code of: $(sed -n "${LINENO}p" "$0")" >&2; '
    "exit $code; fi' ERR"
)
# If this process runs in a job, only these of the job's variables are passed on to the new job.
_KEPT = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_TIME_FORMAT")
# Sites set these in the user's shell, to charge an account. They are passed on unless launch sets them.
_ON_BEHALF = ("account", "qos", "wckey")


def submit(config: Slurm, sweep: Path, submission: Submission) -> str:
    """Submit an array of jobs of one shape. Returns Slurm's number of the array.

    Raises:
        ConfigError: sbatch refuses, or does not answer in time; then `find` looks whether the jobs are in the queue.
    """
    folder = jobs_folder(sweep)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{submission.token}.sh"
    file.write_text(batch_text(config, sweep, submission), encoding="utf-8")
    limit = ["timeout", str(_SBATCH_SECONDS)] if shutil.which("timeout") is not None else []
    intent = submission_file(sweep, submission.token)
    # If this process is killed, its sbatch may live on, and has the lock. The next process takes the lock and so knows
    # that no sbatch runs; an sbatch that starts later finds that the intent's file is gone, and does nothing.
    with (sweep / HANDING_OVER).open("a") as lock:
        # Not every file system has locks: Lustre without -o flock.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(
            ["sh", "-c", 'test -e "$0" && exec "$@"', str(intent), *limit, "sbatch", str(file)],
            env={name: value for name, value in os.environ.items() if not _is_unwanted(config, name)},
            pass_fds=(lock.fileno(),),
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    number = re.search(r"job (\d+)", done.stdout)
    if done.returncode or number is None:
        raise _refused(f"{done.stdout}\n{done.stderr}", _bad(config, sweep, submission.runs))
    return number[1]


def batch_text(config: Slurm, sweep: Path, submission: Submission) -> str:
    """The batch file: flags of sbatch, shell code that prepares the environment, and the call of srun."""
    lines = [
        f"#SBATCH --{name}" if value is True else f"#SBATCH --{name}={shlex.quote(str(value))}"
        for name, value in _flags(config, sweep, submission).items()
    ]
    python = sys.executable if config.python is None else config.python
    task = shlex.join([*_srun(config, sweep, submission.shape), *config.container, python, *submission.command(sweep)])
    return "\n".join(["#!/bin/bash", *lines, *_setup(config, sweep, submission), task, ""])


def _flags(config: Slurm, sweep: Path, submission: Submission) -> dict[str, Any]:
    """Flags of sbatch; True stands for a flag without a value."""
    shape, most = submission.shape, len(submission.runs)
    flags: dict[str, Any] = {
        "job-name": submission.job_name(sweep.name),
        "array": f"0-{most - 1}%{min(most, config.array_parallelism or most)}",
        "output": _log(sweep, "0", "out"),
        "error": _log(sweep, "0", "err"),
        "open-mode": "append",
        "signal": f"USR2@{config.signal_seconds}",
        "partition": config.partition,
        "account": config.account,
        "qos": config.qos,
        "constraint": config.constraint,
        "nodelist": config.nodelist,
        "exclude": ",".join([*filter(None, [config.exclude]), *_bad(config, sweep, submission.runs)]) or None,
        "time": shape.minutes,
        "nodes": shape.nodes,
        "ntasks-per-node": shape.tasks_per_node,
        "cpus-per-task": shape.cpus_per_task,
        "mem": _memory(shape.memory_gib),
        "requeue" if config.requeue else "no-requeue": True,
    }
    if config.ask_for_gpus and shape.gpus_per_node > 0:
        gpus = str(shape.gpus_per_node) if config.gpu_type is None else f"{config.gpu_type}:{shape.gpus_per_node}"
        flags |= {"gres": f"gpu:{gpus}"} if config.gpu_flag == "gres" else {"gpus-per-node": gpus}
    if _survives(config, shape):
        flags["no-kill"] = True
    flags |= {name.replace("_", "-"): value for name, value in config.extra.items()}
    return {name: value for name, value in flags.items() if value is not None and value is not False}


def _log(sweep: Path, task: str, suffix: str) -> Path:
    """The file for the output of a task: ARRAY_INDEX_TASK_log.out, where Slurm fills in the numbers."""
    return jobs_folder(sweep).absolute() / f"%A_%a_{task}_log.{suffix}"


def _survives(config: Slurm, shape: JobShape) -> bool:
    """Whether a job goes on without a node that fails; otherwise Slurm ends it."""
    return config.min_world is not None and shape.nodes > 1


def _bad(config: Slurm, sweep: Path, runs: Sequence[str]) -> list[str]:
    """The hosts on which one of these runs has failed before."""
    if config.nodelist is not None:
        return []  # A node that the user asks for by name is meant.
    return host_names([bad for bad in bad_hosts(sweep.parent) if bad.run in runs])


def _memory(gib: float | None) -> str | None:
    if not gib:
        return None if gib is None else "0"
    return f"{int(gib)}G" if float(gib).is_integer() else f"{int(gib * 1024)}M"


def _setup(config: Slurm, sweep: Path, submission: Submission) -> list[str]:
    environment, shape = submission.environment(sweep), submission.shape
    lines = [_STOP_AT_FAILURE, *config.preamble, "trap - ERR"] if config.preamble else []
    lines += [f"export {name}={shlex.quote(str(value))}" for name, value in config.environment.items()]
    for name, value in environment.items():
        # The user's own modules stay on the path, after the snapshot of the code.
        inherited = "${PYTHONPATH:+:$PYTHONPATH}" if name == "PYTHONPATH" else ""
        lines.append(f"export {name}={shlex.quote(value)}{inherited}")
    if _survives(config, shape):
        # sbatch sets it for the nodes that were requested; a job that has lost one may start again on fewer.
        lines.append(f"export SLURM_NTASKS=$((SLURM_JOB_NUM_NODES * {shape.tasks_per_node}))")
    if config.container or any(word.startswith("--container") for word in config.srun_arguments):
        lines += answering_lines(jobs_folder(sweep).absolute())
    return lines


def _srun(config: Slurm, sweep: Path, shape: JobShape) -> list[str]:
    """The call of srun, so that Slurm does not end ranks: they watch each other, and rank 0 records their ends."""
    words = ["srun", "--unbuffered", f"--output={_log(sweep, '%t', 'out')}", f"--error={_log(sweep, '%t', 'err')}"]
    # The tasks find the code by variables that the batch file exports; under --export=NONE they would lose them.
    words += ["--export=ALL", "--kill-on-bad-exit=0", f"--wait={_WAIT_SECONDS}"]
    if shape.cpus_per_task is not None:
        # Since Slurm 22.05, srun does not inherit this from the job.
        words.append(f"--cpus-per-task={shape.cpus_per_task}")
    if _survives(config, shape):
        words.append("--no-kill")
    return [*words, *config.srun_arguments]


def _is_unwanted(config: Slurm, name: str) -> bool:
    """Whether a variable of this process must not reach the new job.

    For sbatch, SBATCH_* variables win over the batch file: they could set a name by which the job is not found again,
    or a partition and a time limit that nobody has checked. SRUN_* variables would change the job's call of srun. They
    are also removed for keys that the file does not set: a recipe then requests the same from every shell, and the site
    decides what launch leaves open.
    """
    set_by_launch = {key for key, value in config.extra.items() if value is not None}
    set_by_launch |= {key for key in _ON_BEHALF if vars(config).get(key) is not None}
    kept = {*_KEPT, *(f"SBATCH_{key.upper()}" for key in _ON_BEHALF if key not in set_by_launch)}
    return name not in kept and name.startswith(("SLURM_", "SBATCH_", "SRUN_", *MEETING, QUESTIONS))


def _refused(text: str, bad: Sequence[str]) -> ConfigError:
    """The error for a submission that Slurm does not take, perhaps because bad hosts were left out."""
    messages = [line for line in text.splitlines() if re.search(r"sbatch|slurm|rror", line) and "Traceback" not in line]
    lines = [re.sub(r"^.*?sbatch: (error: )?", "", line).strip() for line in messages if "sbatch:" in line] or messages
    # The last line gives the result; the lines before it give the reason.
    rule = "; ".join(line.rstrip(".") for line in lines[-3:]) or "sbatch gave up"
    cure = "mend the keys of launch, and submit again"
    if bad:
        rule += f"; left out were hosts on which these runs have failed: {', '.join(bad)}"
        cure = f"forget one (`titanlab hosts --clear {bad[0]}`), or {cure}"
    return ConfigError("launch", "slurm", f"sbatch says: {rule}", cure)
