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
from titanlab.launch.submission import HANDING_OVER, Submission, jobs_folder

# A call of sbatch that takes longer is killed; then `find` looks for its jobs in the queue.
_SBATCH_SECONDS = 120
# srun's --wait: seconds after the end of the first task. Other ranks may still save after one has ended well.
_WAIT_SECONDS = 600
# A failing line of the preamble ends the job, because the run would lack what the line provides. Lines of files that
# the preamble sources may fail.
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

    sbatch inherits a lock. If this process is killed, its sbatch may live on; the next process takes the lock and so
    knows that no sbatch runs.

    Raises:
        ConfigError: sbatch refuses, or does not answer in time; then `find` looks whether the jobs are in the queue.
    """
    jobs = jobs_folder(sweep)
    jobs.mkdir(parents=True, exist_ok=True)
    file = jobs / f"{submission.token}.sh"
    file.write_text("\n".join(_batch_file(config, sweep, submission)), encoding="utf-8")
    limit = ["timeout", str(_SBATCH_SECONDS)] if shutil.which("timeout") is not None else []
    lock = os.open(sweep / HANDING_OVER, os.O_RDONLY | os.O_CREAT, 0o666)
    try:
        # A file system may have no locks, as Lustre without -o flock.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        answer = subprocess.run(
            [*limit, "sbatch", str(file)],
            capture_output=True,
            check=False,
            encoding="utf-8",
            errors="replace",
            env=_environment(config),
            pass_fds=(lock,),
        )
    finally:
        os.close(lock)
    number = re.search(r"job (\d+)", answer.stdout)
    if answer.returncode or number is None:
        raise _refused(answer.stderr or answer.stdout, _bad(config, sweep, submission.runs))
    return number[1]


def _batch_file(config: Slurm, sweep: Path, submission: Submission) -> list[str]:
    """The lines of the batch file: flags of sbatch, set-up, and the call of srun, which starts the tasks."""
    shape, count = submission.shape, len(submission.runs)
    # A job that may become smaller goes on without a node that fails; otherwise Slurm ends it.
    survives = config.min_world is not None and shape.nodes > 1
    gpus = None
    if config.ask_for_gpus and shape.gpus_per_node > 0:
        gpus = f"{config.gpu_type}:{shape.gpus_per_node}" if config.gpu_type is not None else str(shape.gpus_per_node)
    log = str(jobs_folder(sweep).absolute() / "%A_%a_%t_log")
    flags: dict[str, Any] = {
        "job-name": submission.job_name(sweep.name),
        "array": f"0-{count - 1}%{min(config.array_parallelism or count, count)}",
        "output": f"{log.replace('%t', '0')}.out",
        "error": f"{log.replace('%t', '0')}.err",
        "open-mode": "append",
        "signal": f"USR2@{config.signal_seconds}",
        "requeue" if config.requeue else "no-requeue": True,
        "no-kill": survives,
        **{name: getattr(config, name) for name in ("partition", "account", "qos", "constraint", "nodelist")},
        "exclude": ",".join([*filter(None, [config.exclude]), *_bad(config, sweep, submission.runs)]) or None,
        "time": shape.minutes,
        "nodes": shape.nodes,
        "ntasks-per-node": shape.tasks_per_node,
        "cpus-per-task": shape.cpus_per_task,
        "gpus-per-node": gpus if config.gpu_flag == "gpus-per-node" else None,
        "gres": f"gpu:{gpus}" if gpus is not None and config.gpu_flag == "gres" else None,
        "mem": _memory(shape.memory_gib),
    }
    flags |= {
        name.replace("_", "-"): value
        for name, value in config.extra.items()
        if value is not None and value is not False
    }
    # Slurm must not end ranks: they watch each other, and rank 0 records their ends. The batch file exports variables
    # by which the tasks find the code; --export=NONE would drop them.
    srun = ["srun", "--unbuffered", f"--output={log}.out", f"--error={log}.err"]
    srun += ["--export=ALL", "--kill-on-bad-exit=0", f"--wait={_WAIT_SECONDS}"]
    # Since Slurm 22.05, srun does not inherit this from the job.
    srun += [f"--cpus-per-task={shape.cpus_per_task}"] if shape.cpus_per_task is not None else []
    srun += ["--no-kill"] if survives else []
    python = sys.executable if config.python is None else config.python
    command = [*srun, *config.srun_arguments, *config.container, python, *submission.command(sweep)]
    return [
        "#!/bin/bash",
        *(
            f"#SBATCH --{name}{_value(value)}"
            for name, value in flags.items()
            if value is not None and value is not False
        ),
        "# setup",
        *_setup(config, sweep, submission, survives=survives),
        "# command",
        shlex.join(command),
        "",
    ]


def _value(value: object) -> str:
    return "" if value is True else f"={shlex.quote(str(value))}"


def _bad(config: Slurm, sweep: Path, runs: Sequence[str]) -> list[str]:
    """The hosts on which one of these runs has failed before."""
    if config.nodelist is not None:
        return []  # The user asks for nodes by name: use them.
    return host_names([bad for bad in bad_hosts(sweep.parent) if bad.run in runs])


def _memory(gib: float | None) -> str | None:
    if not gib:
        return None if gib is None else "0"
    return f"{int(gib)}G" if float(gib).is_integer() else f"{int(gib * 1024)}M"


def _setup(config: Slurm, sweep: Path, submission: Submission, *, survives: bool) -> list[str]:
    lines = [_STOP_AT_FAILURE, *config.preamble, "trap - ERR"] if config.preamble else []
    lines += [f"export {name}={shlex.quote(str(value))}" for name, value in config.environment.items()]
    for name, value in submission.environment(sweep).items():
        # The user's own modules stay on the path, after the snapshot of the code.
        inherited = "${PYTHONPATH:+:$PYTHONPATH}" if name == "PYTHONPATH" else ""
        lines.append(f"export {name}={shlex.quote(value)}{inherited}")
    if survives:
        # sbatch sets it for the nodes that were requested; a job that has lost one may start again on fewer.
        lines.append(f"export SLURM_NTASKS=$((SLURM_JOB_NUM_NODES * {submission.shape.tasks_per_node}))")
    if config.container or any(word.startswith("--container") for word in config.srun_arguments):
        lines += answering_lines(jobs_folder(sweep).absolute())
    return lines


def _environment(config: Slurm) -> dict[str, str]:
    """The variables of this process without those that would change the new job.

    For sbatch, SBATCH_* variables win over the batch file: they could set a name by which the job is not found again,
    or a partition and a time limit that nobody has checked. SRUN_* variables would change the job's call of srun. They
    are also removed for keys that the file does not set: a recipe then requests the same from every shell, and the site
    decides what launch leaves open.
    """
    set_by_launch = {name for name, value in config.extra.items() if value is not None}
    set_by_launch |= {name for name in _ON_BEHALF if vars(config).get(name) is not None}
    kept = {*_KEPT, *(f"SBATCH_{name.upper()}" for name in _ON_BEHALF if name not in set_by_launch)}
    unwanted = ("SLURM_", "SBATCH_", "SRUN_", *MEETING, QUESTIONS)
    return {name: value for name, value in os.environ.items() if name in kept or not name.startswith(unwanted)}


def _refused(text: str, bad: Sequence[str]) -> ConfigError:
    """The error for a submission that Slurm does not take, perhaps because bad hosts were left out."""
    printed = [line.strip() for line in text.splitlines() if line.strip()]
    lines = [re.sub(r"^.*?sbatch: (error: )?", "", line) for line in printed if "sbatch:" in line] or printed
    # The last line gives the result; the lines before it give the reason.
    rule = "; ".join(line.rstrip(".") for line in lines[-3:]) or "sbatch gave up"
    cure = "mend the keys of launch, and submit again"
    if bad:
        rule += f"; left out were hosts on which these runs have failed: {', '.join(bad)}"
        cure = f"forget one (`titanlab hosts --clear {bad[0]}`), or {cure}"
    return ConfigError("launch", "slurm", f"sbatch says: {rule}", cure)
