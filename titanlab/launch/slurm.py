"""launch=slurm: arrays of jobs, asked for through submitit and found again by their names.

Of submitit it takes the batch file and the call of sbatch. Its pickles are not used: a job's command says all, so that
nothing is missing when the process that submits is killed.
"""

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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlab.distributed.ranks import MEETING
from titanlab.errors import ConfigError
from titanlab.launch.shape import Shape
from titanlab.launch.slurm_array import expression_of, token_of
from titanlab.launch.slurm_command import accounted_since, ask_slurm
from titanlab.launch.slurm_schema import Slurm

# At most, whatever a site allows; a longer row of jobs becomes several arrays.
MAX_ARRAY = 1000
# Arrays in one call of scancel, whose line of arguments has an end.
_MAX_WORDS = 500
# The reason of a job that sbatch was refused: no node can ever have what it asks for.
REFUSED = "BadConstraints"
_COMMANDS = ("sbatch", "srun", "squeue", "sinfo")
# One that has not answered by then is ended; whether its jobs are in the queue, the queue tells.
_SBATCH_SECONDS = 120
_CANCEL_SECONDS = 60.0
# After the first task has ended; a rank that ended well may still wait for others that save.
_WAIT_SECONDS = 600
# Of a job that this process runs in; the new job is not part of that one.
_KEPT = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_TIME_FORMAT")
# On whose behalf is asked, which sites set for a person's shell; each as long as launch does not say it.
_ON_BEHALF = ("account", "qos", "wckey")
# What scancel says of single jobs: the others have been told.
_PASSED_OVER = re.compile("nvalid job id|can not be altered now|already completing")


@dataclass(frozen=True, kw_only=True)
class Array:
    """Jobs to ask for.

    Attributes:
        name: of the jobs, by which they are found again.
        count: how many.
        command: what every task runs, as words; it finds its index in SLURM_ARRAY_TASK_ID.
        environment: variables of the command, after the site's own.
        folder: for the batch file and what tasks print.
        guard: a file and a lock: sbatch is called under the lock, and only if the file is there; None: at once.
    """

    name: str
    count: int
    command: Sequence[str]
    environment: Mapping[str, str]
    folder: Path
    guard: tuple[Path, Path] | None = None


def is_here() -> bool:
    """Whether this host can submit to Slurm."""
    return all(shutil.which(command) is not None for command in _COMMANDS)


def silence() -> str | None:
    """Why Slurm does not answer, in a line; None where it does."""
    return ask_slurm("sinfo", "--noheader", "--format=%P").problem


def check(jobs: Sequence[tuple[Slurm, Shape]]) -> None:
    """Hold Slurm to be here, and to have what the jobs ask for, as far as it tells.

    Raises:
        ConfigError: it is not, or does not answer, or a partition is unknown or too small.
    """
    for command in _COMMANDS:
        if shutil.which(command) is None:
            rule = f"Slurm is not here: there is no {command} on PATH"
            raise ConfigError("launch", "slurm", rule, "submit from a login node of the cluster, or try launch=local")
    partitions = _partitions()
    for config, shape in jobs:
        # Without a name it is the default, which sinfo lists under the empty one here.
        asked = config.partition if config.partition is not None else ""
        names = [name for name in asked.split(",") if name in partitions or asked]
        for name in names:
            if name not in partitions:
                cure = f"known: {', '.join(sorted(filter(None, partitions)))}"
                raise ConfigError("launch.partition", config.partition, "Slurm knows no such partition", cure)
        sizes = [partitions[name] for name in names]
        if sizes and shape.nodes > max(sizes):
            where = f"partition {asked}" if asked else "the default partition"
            rule = f"needs {shape.nodes} nodes, and {where} has {max(sizes)}"
            cure = f"try world={max(sizes) * shape.tasks_per_node}, or another partition"
            raise ConfigError("world", shape.processes, rule, cure)


def max_array() -> int:
    """How many jobs one array takes here; MAX_ARRAY where Slurm does not tell."""
    told = ask_slurm("scontrol", "show", "config").output or ""
    # MaxArraySize is one more than the largest index, and the first is 0. With 0 there are no arrays: sbatch says so.
    limits = re.findall(r"(?:^MaxArraySize\s*=\s*|\bmax_array_tasks=)(\d+)", told, re.MULTILINE)
    return max(1, min([MAX_ARRAY, *map(int, limits)]))


def submit(config: Slurm, shape: Shape, array: Array) -> str:
    """Ask for an array of jobs of one shape. Returns Slurm's number of it.

    Raises:
        ConfigError: sbatch refuses it, or does not answer in time; whether the jobs are in the queue, `find` tells.
    """
    # Not at the top: it takes long, and most verbs need none of it.
    from submitit.core.utils import FailedJobError, FailedSubmissionError
    from submitit.slurm.slurm import SlurmExecutor

    class Guarded(SlurmExecutor):
        def _make_submission_command(self, submission_file_path: Path) -> list[str]:
            return _sbatch(config, submission_file_path, array.guard)

    array.folder.mkdir(parents=True, exist_ok=True)
    executor = Guarded(array.folder)
    executor.update_parameters(**_parameters(config, shape, array))
    executor.parameters["map_count"] = array.count
    try:
        # It prints what sbatch said, which is told in one line here.
        with contextlib.redirect_stderr(io.StringIO()):
            return str(executor._submit_command(_command(config, array)).job_id)
    except (FailedJobError, FailedSubmissionError) as error:
        raise _refused(str(error)) from None


def find(token: str, *, since: float) -> str | None:
    """Slurm's number of the jobs of a submission, whether they wait, run or have ended; None if it has none.

    They are known by the end of their name: elements of an array take another name when they start.

    Args:
        token: of the submission.
        since: none of its jobs is older, in seconds since the epoch.

    Raises:
        ConfigError: Slurm does not answer, so that nothing is known.
    """
    listed = ask_slurm("squeue", "--noheader", "--all", "--states=all", "--format=%j|%F|%T|%r")
    if listed.output is None:
        raise _undecided(listed.problem)
    for line in listed.output.splitlines():
        name, number, state, reason = (line.split("|") + [""] * 4)[:4]
        # What sbatch was refused stays in the queue's list for some minutes, and was never a job.
        if token_of(name) == token and (state, reason) != ("FAILED", REFUSED):
            return number
    # The queue forgets jobs some minutes after their end; the accounting, where there is one, does not.
    listed = accounted_since(since, "--allocations", "--format=JobName,JobID")
    if listed.output is None and listed.is_here and "accounting storage is disabled" not in listed.errors:
        raise _undecided(listed.problem)
    rows = [line.split("|") for line in (listed.output or "").splitlines()]
    return next((row[1].split("_")[0] for row in rows if len(row) == 2 and token_of(row[0]) == token), None)


def cancel(jobs: Mapping[str, Collection[int]], *, gently: bool = False) -> None:
    """End elements of arrays, all in one call; those that have ended are passed over.

    Args:
        jobs: elements by the array's number.
        gently: they run; their processes are told, and have all the time that they need to save. Without it, Slurm
            kills what has not ended within KillWait, half a minute on most sites.

    Raises:
        ConfigError: Slurm does not answer.
    """
    # SIGINT is a person's wish by itself: a process that does not yet see cancel.json, for a file system that is slow
    # to show it, takes it for nothing else. Its steps get it; the shell around them does not, and waits.
    how = ["--signal=INT"] if gently else []
    words = [f"{number}_[{expression_of(elements)}]" for number, elements in jobs.items()]
    for first in range(0, len(words), _MAX_WORDS):
        reply = ask_slurm("scancel", *how, *words[first : first + _MAX_WORDS], seconds=_CANCEL_SECONDS)
        if reply.problem is not None and not _PASSED_OVER.search(reply.errors):
            rule = f"Slurm does not answer, and the jobs may go on ({reply.problem})"
            raise ConfigError("launch", "slurm", rule, "try again when `squeue` answers")


def _undecided(problem: str | None) -> ConfigError:
    rule = f"Slurm does not answer, and an earlier submission may have reached it ({problem})"
    return ConfigError("launch", "slurm", rule, "try again when `squeue` and `sacct` answer; nothing was submitted")


def _parameters(config: Slurm, shape: Shape, array: Array) -> dict[str, Any]:
    """What submitit writes into the head of the batch file; None leaves a flag out."""
    gpus: int | str | None = shape.gpus_per_node or None
    if gpus is not None and config.gpu_type is not None:
        gpus = f"{config.gpu_type}:{gpus}"
    given = {
        "job_name": array.name,
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
        "array_parallelism": config.array_parallelism or array.count,
        # submitit's own names for its users' accounts.
        "wckey": None,
        "setup": _setup(config, array),
        "srun_args": _srun(config, shape),
    }
    flags = {name: value for name, value in config.extra.items() if value not in (None, False)}
    return {**given, "additional_parameters": {"requeue" if config.requeue else "no-requeue": True, **flags}}


def _memory(gib: float | None) -> str | None:
    if not gib:
        return None if gib is None else "0"
    return f"{int(gib)}G" if float(gib).is_integer() else f"{int(gib * 1024)}M"


def _setup(config: Slurm, array: Array) -> list[str]:
    lines = list(config.preamble)
    lines += [f"export {name}={shlex.quote(str(value))}" for name, value in config.environment.items()]
    for name, value in array.environment.items():
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


def _command(config: Slurm, array: Array) -> str:
    python = sys.executable if config.python is None else config.python
    words = [*config.container, python, *array.command]
    return shlex.join(words)


def _sbatch(config: Slurm, batch_file: Path, guard: tuple[Path, Path] | None) -> list[str]:
    """The call of sbatch, without variables that would change the job; under the guard's lock, if there is a guard.

    A process that is killed leaves its sbatch behind. Whoever comes next takes the lock, and knows that none is under
    way; one that has not begun by then finds its file gone, and does nothing.
    """
    limit = ["timeout", str(_SBATCH_SECONDS)] if shutil.which("timeout") is not None else []
    plain = ["env", *(f"--unset={name}" for name in _unwanted(config)), *limit, "sbatch", str(batch_file)]
    if guard is None:
        return plain
    file, lock = guard
    held = ["flock", str(lock)] if shutil.which("flock") is not None and _has_locks(lock) else []
    return [*held, "sh", "-c", 'test -e "$0" && exec "$@"', str(file), *plain]


def _unwanted(config: Slurm) -> list[str]:
    """Variables of this process that are not for the new job.

    sbatch takes SBATCH_* before what its file says: a name by which no job is found again, a partition and a time that
    nobody has checked. What launch leaves to the site is the site's alone, also for those that the file does not set,
    so that a recipe asks for the same from every shell.
    """
    said = {name for name, value in config.extra.items() if value is not None}
    said |= {name for name in _ON_BEHALF if getattr(config, name, None) is not None}
    kept = {*_KEPT, *(f"SBATCH_{name.upper()}" for name in _ON_BEHALF if name not in said)}
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
    told = [line for line in text.splitlines() if re.search(r"sbatch|slurm|rror", line) and "Traceback" not in line]
    lines = [re.sub(r"^.*?sbatch: (error: )?", "", line).strip() for line in told if "sbatch:" in line] or told
    # The last one says what it comes to; those before say why.
    rule = "; ".join(line.rstrip(".") for line in lines[-3:]) or "sbatch gave up"
    return ConfigError("launch", "slurm", f"sbatch says: {rule}", "mend the keys of launch, and submit again")


def _partitions() -> dict[str, int]:
    """Nodes of every partition, and under the empty name those of the default.

    Raises:
        ConfigError: Slurm does not answer.
    """
    listed = ask_slurm("sinfo", "--noheader", "--all", "--format=%P %D")
    if listed.output is None:
        cure = "try again when `sinfo` answers; nothing was submitted"
        raise ConfigError("launch", "slurm", f"Slurm does not answer ({listed.problem})", cure)
    found: dict[str, int] = {}
    for line in listed.output.splitlines():
        name, _, count = line.strip().partition(" ")
        with contextlib.suppress(ValueError):
            for key in {name.rstrip("*"), "" if name.endswith("*") else name}:
                found[key] = found.get(key, 0) + int(count)
    return found
