"""Arrays of jobs: the batch file and the call of sbatch."""

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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titanlab.distributed.ranks import MEETING
from titanlab.errors import ConfigError
from titanlab.launch.shape import Shape
from titanlab.launch.slurm_schema import Slurm
from titanlab.launch.submission import HANDING_OVER, Submission, jobs_folder, submission_file

# An sbatch that has not answered by then is ended; `find` says whether its jobs are in the queue.
_SBATCH_SECONDS = 120
# After the first task has ended; a rank that ended well may still wait for others that save.
_WAIT_SECONDS = 600
# Variables of a job that this process runs in are not for the new job, except these.
_KEPT = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_TIME_FORMAT")
# Whose account is charged: sites set this for a person's shell. Each is kept as long as launch does not set it.
_ON_BEHALF = ("account", "qos", "wckey")


def submit(config: Slurm, sweep: Path, submission: Submission) -> str:
    """Ask for an array of jobs of one shape. Returns Slurm's number of it.

    Raises:
        ConfigError: sbatch refuses it, or does not answer in time; `find` says whether the jobs are in the queue.
    """
    # Not at the top: it takes long, and most verbs need none of it.
    from submitit.core.utils import FailedJobError, FailedSubmissionError
    from submitit.slurm.slurm import SlurmExecutor

    class BatchExecutor(SlurmExecutor):
        """Submits a command without a pickle, with our own call of sbatch.

        submitit's public `submit` pickles a function for each job and moves the pickles once sbatch has answered: a
        process that is killed in between leaves jobs that find nothing to run. A job's command says all here. For that,
        these two methods, which submitit's own executors of clusters define and call, are used by a subclass. They can
        go when submitit offers a command without pickles (`_submit_command` in submitit/core/core.py).
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
    try:
        # It prints what sbatch said; the error says that in one line.
        with contextlib.redirect_stderr(io.StringIO()):
            return executor.submit_command(_command(config, sweep, submission))
    except (FailedJobError, FailedSubmissionError) as error:
        raise _refused(str(error)) from None


def _parameters(config: Slurm, sweep: Path, submission: Submission) -> dict[str, Any]:
    """What submitit writes into the head of the batch file; None leaves a flag out."""
    shape = submission.shape
    gpus: int | str | None = shape.gpus_per_node or None
    if gpus is not None and config.gpu_type is not None:
        gpus = f"{config.gpu_type}:{gpus}"
    given = {
        "job_name": submission.job_name(sweep.name),
        "partition": config.partition,
        "account": config.account,
        "qos": config.qos,
        "constraint": config.constraint,
        "nodelist": config.nodelist,
        "exclude": config.exclude,
        "time": shape.minutes,
        "nodes": shape.nodes,
        "ntasks_per_node": shape.tasks_per_node,
        "cpus_per_task": shape.cpus_per_task,
        "gpus_per_node": gpus if config.ask_for_gpus else None,
        "mem": _memory(shape.memory_gib),
        "signal_delay_s": config.signal_seconds,
        "array_parallelism": config.array_parallelism or len(submission.runs),
        # submitit's own names for its users' accounts.
        "wckey": None,
        "setup": _setup(config, submission.environment(sweep)),
        "srun_args": _srun(config, shape),
    }
    flags = {name: value for name, value in config.extra.items() if value not in (None, False)}
    return {**given, "additional_parameters": {"requeue" if config.requeue else "no-requeue": True, **flags}}


def _memory(gib: float | None) -> str | None:
    if not gib:
        return None if gib is None else "0"
    return f"{int(gib)}G" if float(gib).is_integer() else f"{int(gib * 1024)}M"


def _setup(config: Slurm, environment: Mapping[str, str]) -> list[str]:
    lines = list(config.preamble)
    lines += [f"export {name}={shlex.quote(str(value))}" for name, value in config.environment.items()]
    for name, value in environment.items():
        # Behind our copy of the code there may be a person's own modules.
        kept = "${PYTHONPATH:+:$PYTHONPATH}" if name == "PYTHONPATH" else ""
        lines.append(f"export {name}={shlex.quote(value)}{kept}")
    return lines


def _srun(config: Slurm, shape: Shape) -> list[str]:
    """Words for srun: ranks see to each other themselves, and rank 0 writes down how they ended."""
    # What the batch file exports leads to the code; a job that was submitted with --export=NONE would lose it.
    words = ["--export=ALL", "--kill-on-bad-exit=0", f"--wait={_WAIT_SECONDS}"]
    if shape.cpus_per_task is not None:
        # Since Slurm 22.05 it no longer takes this from the job.
        words.append(f"--cpus-per-task={shape.cpus_per_task}")
    return [*words, *config.srun_arguments]


def _command(config: Slurm, sweep: Path, submission: Submission) -> str:
    python = sys.executable if config.python is None else config.python
    words = [*config.container, python, *submission.command(sweep)]
    return shlex.join(words)


def _sbatch(config: Slurm, batch_file: Path, intent: Path, lock: Path) -> list[str]:
    """The call of sbatch, without variables that would change the job, under a lock.

    A process that is killed leaves its sbatch behind. The next process takes the lock, and so knows that no sbatch
    runs; one that has not begun by then finds its intent gone, and does nothing.
    """
    limit = ["timeout", str(_SBATCH_SECONDS)] if shutil.which("timeout") is not None else []
    plain = ["env", *(f"--unset={name}" for name in _unwanted(config)), *limit, "sbatch", str(batch_file)]
    locked = ["flock", str(lock)] if shutil.which("flock") is not None and _has_locks(lock) else []
    return [*locked, "sh", "-c", 'test -e "$0" && exec "$@"', str(intent), *plain]


def _unwanted(config: Slurm) -> list[str]:
    """Variables of this process that are not for the new job.

    sbatch takes SBATCH_* before what its file says: a name by which no job is found again, a partition and a time that
    nobody has checked. What launch leaves to the site is the site's alone, also for those that the file does not set,
    so that a recipe asks for the same from every shell.
    """
    given = {name for name, value in config.extra.items() if value is not None}
    given |= {name for name in _ON_BEHALF if vars(config).get(name) is not None}
    kept = {*_KEPT, *(f"SBATCH_{name.upper()}" for name in _ON_BEHALF if name not in given)}
    return [name for name in os.environ if name not in kept and name.startswith(("SLURM_", "SBATCH_", *MEETING))]


def _has_locks(lock: Path) -> bool:
    """Whether the file system has them: flock(1) fails where it does not, as on Lustre without -o flock."""
    descriptor = os.open(lock, os.O_RDONLY | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True  # Somebody holds it.
    except OSError as error:
        return error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
    finally:
        os.close(descriptor)
    return True


def _refused(text: str) -> ConfigError:
    said = [line for line in text.splitlines() if re.search(r"sbatch|slurm|rror", line) and "Traceback" not in line]
    lines = [re.sub(r"^.*?sbatch: (error: )?", "", line).strip() for line in said if "sbatch:" in line] or said
    # The last one says what it comes to; those before say why.
    rule = "; ".join(line.rstrip(".") for line in lines[-3:]) or "sbatch gave up"
    return ConfigError("launch", "slurm", f"sbatch says: {rule}", "mend the keys of launch, and submit again")
