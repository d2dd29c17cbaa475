"""Submits arrays of jobs: the batch file and the call of sbatch."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titanlab.distributed import MEETING, QUESTIONS
from titanlab.errors import ConfigError
from titanlab.launch.evidence import bad_hosts, host_names
from titanlab.launch.launchers_schema import Slurm
from titanlab.launch.slurm.command import answering_lines
from titanlab.launch.submission import HANDING_OVER, Submission, jobs_folder, submission_file

# A call of sbatch that takes longer is killed; then `find` looks for its jobs in the queue.
_SBATCH_SECONDS = 120
# srun's --wait: how long tasks may run after the first one has ended. Some ranks save for longer than others.
_WAIT_SECONDS = 600
# A failing line of the preamble ends the job, because the run would lack what the line provides. In files that the
# preamble sources, lines may fail.
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
    # Imported here: the import is slow, and most verbs do not need it.
    from submitit.core.utils import FailedJobError, FailedSubmissionError
    from submitit.slurm.slurm import SlurmExecutor

    class BatchExecutor(SlurmExecutor):
        """Submits a command without a pickle, with titanlab's own call of sbatch.

        submitit's public `submit` pickles a function for each job and moves the pickles after sbatch has answered: if
        the process is killed in between, the jobs have nothing to run. Here the command contains everything that a job
        needs. The subclass therefore defines and calls these two methods, as submitit's own executors do. They can go
        when submitit can submit a command without pickles (`_submit_command` in submitit/core/core.py).
        """

        def _make_submission_command(self, submission_file_path: Path) -> list[str]:
            return _sbatch(config, submission_file_path, intent, lock)

        def submit_command(self, command: str) -> str:
            return str(self._submit_command(command).job_id)

    intent, lock = submission_file(sweep, submission.token), sweep / HANDING_OVER
    folder = jobs_folder(sweep)
    folder.mkdir(parents=True, exist_ok=True)
    executor = BatchExecutor(folder)
    executor.update_parameters(**_parameters(config, sweep, submission))
    executor.parameters["map_count"] = len(submission.runs)
    python = sys.executable if config.python is None else config.python
    try:
        # submitit prints sbatch's message; the error below has it in one line.
        with contextlib.redirect_stderr(io.StringIO()):
            return executor.submit_command(shlex.join([*config.container, python, *submission.command(sweep)]))
    except (FailedJobError, FailedSubmissionError) as error:
        raise _refused(str(error), _bad(config, sweep, submission.runs)) from None


def _parameters(config: Slurm, sweep: Path, submission: Submission) -> dict[str, Any]:
    """The parameters that submitit writes into the head of the batch file; None omits a flag."""
    shape = submission.shape
    # A job that may become smaller goes on without a node that fails; otherwise Slurm ends it.
    survives = config.min_world is not None and shape.nodes > 1
    asks_for_gpus = config.ask_for_gpus and shape.gpus_per_node > 0
    gpus = shape.gpus_per_node if config.gpu_type is None else f"{config.gpu_type}:{shape.gpus_per_node}"
    # Slurm must not end ranks: they watch each other, and rank 0 records their ends. The batch file exports variables
    # by which the tasks find the code; --export=NONE would drop them.
    srun = ["--export=ALL", "--kill-on-bad-exit=0", f"--wait={_WAIT_SECONDS}"]
    # Since Slurm 22.05, srun does not inherit --cpus-per-task from the job.
    srun += [f"--cpus-per-task={shape.cpus_per_task}"] if shape.cpus_per_task is not None else []
    srun += ["--no-kill"] if survives else []
    flags: dict[str, Any] = {"requeue" if config.requeue else "no-requeue": True}
    flags |= {"no-kill": True} if survives else {}
    flags |= {"gres": f"gpu:{gpus}"} if asks_for_gpus and config.gpu_flag == "gres" else {}
    flags |= {name: value for name, value in config.extra.items() if value is not None and value is not False}
    return {
        "job_name": submission.job_name(sweep.name),
        "partition": config.partition,
        "account": config.account,
        "qos": config.qos,
        "constraint": config.constraint,
        "nodelist": config.nodelist,
        "exclude": ",".join([*filter(None, [config.exclude]), *_bad(config, sweep, submission.runs)]) or None,
        "time": shape.minutes,
        "nodes": shape.nodes,
        "ntasks_per_node": shape.tasks_per_node,
        "cpus_per_task": shape.cpus_per_task,
        "gpus_per_node": gpus if asks_for_gpus and config.gpu_flag == "gpus-per-node" else None,
        "mem": _memory(shape.memory_gib),
        "signal_delay_s": config.signal_seconds,
        "array_parallelism": config.array_parallelism or len(submission.runs),
        # Without this, submitit would set a default of its own.
        "wckey": None,
        "setup": _setup(config, sweep, submission, survives=survives),
        "srun_args": [*srun, *config.srun_arguments],
        "additional_parameters": flags,
    }


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
        # sbatch sets SLURM_NTASKS for the requested nodes; a job that has lost a node may start again on fewer nodes.
        lines.append(f"export SLURM_NTASKS=$((SLURM_JOB_NUM_NODES * {submission.shape.tasks_per_node}))")
    if config.container or any(word.startswith("--container") for word in config.srun_arguments):
        lines += answering_lines(jobs_folder(sweep).absolute())
    return lines


def _sbatch(config: Slurm, batch_file: Path, intent: Path, lock: Path) -> list[str]:
    """The call of sbatch under a lock, without variables that would change the job.

    If this process is killed, its sbatch may live on. The next process takes the lock and so knows that no sbatch runs;
    an sbatch that starts later finds that the intent's file is gone, and does nothing.
    """
    limit = ["timeout", str(_SBATCH_SECONDS)] if shutil.which("timeout") is not None else []
    plain = ["env", *(f"--unset={name}" for name in _unwanted(config)), *limit, "sbatch", str(batch_file)]
    locked = ["flock", str(lock)] if shutil.which("flock") is not None and _has_locks(lock) else []
    return [*locked, "sh", "-c", 'test -e "$0" && exec "$@"', str(intent), *plain]


def _unwanted(config: Slurm) -> list[str]:
    """Variables of this process that must not reach the new job.

    For sbatch, SBATCH_* variables win over the batch file: they could set a name by which the job is not found again,
    or a partition and a time limit that nobody has checked. SRUN_* variables would change the job's call of srun. All
    these variables are removed, even if the batch file does not set the same flag: a recipe then asks for the same from
    every shell, and the site decides what launch leaves open.
    """
    set_by_launch = {name for name, value in config.extra.items() if value is not None}
    set_by_launch |= {name for name in _ON_BEHALF if vars(config).get(name) is not None}
    kept = {*_KEPT, *(f"SBATCH_{name.upper()}" for name in _ON_BEHALF if name not in set_by_launch)}
    unwanted = ("SLURM_", "SBATCH_", "SRUN_", *MEETING, QUESTIONS)
    return [name for name in os.environ if name not in kept and name.startswith(unwanted)]


def _has_locks(lock: Path) -> bool:
    """Whether the file system supports locks: flock(1) fails without locks, such as on Lustre without -o flock."""
    descriptor = os.open(lock, os.O_RDONLY | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True  # Another process holds the lock.
    except OSError as error:
        return error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
    finally:
        os.close(descriptor)
    return True


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
