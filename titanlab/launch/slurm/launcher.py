"""launch=slurm: arrays of jobs of a Slurm cluster, identified by their names.

Slurm sends the same signals for a preemption, a time limit and a cancellation. Observed with Slurm 22.05: during the
grace time of a preemption `PreemptTime` is set; after a requeue `Restarts` is one higher; after the time limit the
reason is `TimeLimit`; after a node failure it is `NodeDown`; a job that scancel ends is `COMPLETING` without any of
these. Warnings before a time limit come up to a minute early. A job submitted with --no-kill keeps its other nodes when
a node fails, even its first node: then its batch script is gone, and only its time limit ends it.
"""

from __future__ import annotations

import calendar
import contextlib
import importlib.util
import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from titanlab.distributed import Ranks, gpus, number
from titanlab.errors import ConfigError
from titanlab.launch.contract import (
    JobKey,
    JobState,
    LaunchConfig,
    Launcher,
    MemoryWord,
    ProcessPlace,
    StopReason,
)
from titanlab.launch.evidence import early_end
from titanlab.launch.launchers_schema import Slurm
from titanlab.launch.slurm import batch, command, site
from titanlab.launch.slurm.command import (
    REFUSED,
    accounted_since,
    ask_slurm,
    expression_of,
    hosts,
    node_address,
    scontrol,
)
from titanlab.launch.submission import JobShape, Submission, jobs_folder, token_of
from titanlab.records import OutcomeKind
from titanlab.system import Finding

# Variables that Slurm sets for --gpus-per-task and --gpu-bind.
_GPUS_OF_A_TASK = ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_GPU_BIND")
# The largest array, whatever a site allows; more jobs are split into several arrays.
MAX_ARRAY = 1000
# The most arrays in one call of scancel, to limit the length of its command line.
_MAX_WORDS = 500
_CANCEL_SECONDS = 60.0
# Errors of scancel about single jobs that have already ended; the other jobs have been signalled.
_ALREADY_ENDED = re.compile("nvalid job id|can not be altered now|already completing")
# Warnings before a time limit come up to a minute early.
EARLY_SECONDS = 75.0
_TIMEOUT_SECONDS = 20.0
_SLOW_SECONDS = 30.0
_REQUEUE_SECONDS = 60.0
_TRIES = 3


class SlurmLauncher(Launcher):
    """Jobs of a Slurm cluster.

    Args:
        config: the config of the jobs that are submitted.
    """

    has_scheduler = True
    can_requeue = True
    replaced_in_paths = "%\\"
    repeats_signals = True

    def __init__(self, config: Slurm) -> None:
        self._config = config

    def is_here(self) -> bool:
        return _has_submitit() and all(shutil.which(name) is not None for name in site.COMMANDS)

    def silence(self) -> str | None:
        return ask_slurm("sinfo", "--noheader", "--format=%P").problem

    def check(self, jobs: Sequence[tuple[LaunchConfig, JobShape]]) -> None:
        site.check(jobs)
        if not _has_submitit():
            rule = "needs submitit to start jobs, which is not installed"
            raise ConfigError("launch", "slurm", rule, "pip install submitit")

    def findings(self) -> Iterator[Finding]:
        yield from site.check_slurm(self._config)

    def max_array(self, *, is_answered: bool = True) -> int:
        # If Slurm does not answer, MAX_ARRAY remains, which every site takes.
        settings = (ask_slurm("scontrol", "show", "config").output or "") if is_answered else ""
        # MaxArraySize is one more than the largest index; the first index is 0. If it is 0, sbatch refuses all arrays.
        limits = re.findall(r"(?:^MaxArraySize\s*=\s*|\bmax_array_tasks=)(\d+)", settings, re.MULTILINE)
        return max(1, min([MAX_ARRAY, *map(int, limits)]))

    def submit(self, sweep: Path, submission: Submission) -> str:
        return batch.submit(self._config, sweep, submission)

    def find(self, sweep: Path, submission: Submission) -> str | None:
        # Search by the end of the job's name: elements of an array are renamed when they start.
        token = submission.token
        listed = ask_slurm("squeue", "--noheader", "--all", "--states=all", "--format=%j|%F|%T|%r")
        if listed.output is None:
            raise _undecided(listed.problem)
        for line in listed.output.splitlines():
            name, number, state, reason = (line.split("|") + [""] * 4)[:4]
            # A submission that sbatch refused stays in the listing for some minutes, though it never was a job.
            if token_of(name) == token and (state, reason) != ("FAILED", REFUSED):
                return number
        # The queue forgets jobs some minutes after their end; the accounting, if the site has it, does not.
        listed = accounted_since(submission.created, "--allocations", "--format=JobName,JobID")
        if listed.output is None and listed.is_here and "accounting storage is disabled" not in listed.errors:
            raise _undecided(listed.problem)
        rows = [line.split("|") for line in (listed.output or "").splitlines()]
        return next((row[1].split("_")[0] for row in rows if len(row) == 2 and token_of(row[0]) == token), None)

    def states(self, sweep: Path, submitted: Sequence[Submission]) -> dict[JobKey, JobState]:
        return command.slurm_states(submitted, sweep)

    def cancel(
        self, sweep: Path, jobs: Sequence[tuple[Submission, int]], report: Callable[[str], None], *, is_gentle: bool
    ) -> None:
        arrays: dict[str, list[int]] = {}
        for submission, index in jobs:
            arrays.setdefault(str(submission.job_id), []).append(index)
        # After a plain scancel Slurm kills what has not ended within KillWait, half a minute on most sites. SIGINT
        # always means a user's cancellation, also to a process whose slow file system does not show cancel.json yet.
        # The job's steps get the signal; the shell that runs the steps does not, and waits for them.
        flags = ["--signal=INT"] if is_gentle else []
        words = [f"{number}_[{expression_of(elements)}]" for number, elements in arrays.items()]
        for first in range(0, len(words), _MAX_WORDS):
            reply = ask_slurm("scancel", *flags, *words[first : first + _MAX_WORDS], seconds=_CANCEL_SECONDS)
            if reply.problem is not None and not _ALREADY_ENDED.search(reply.errors):
                rule = f"Slurm does not answer, and the jobs may go on ({reply.problem})"
                raise ConfigError("launch", "slurm", rule, "try again when `squeue` answers")

    def job_number(self, submission: Submission, index: int) -> str | None:
        return f"{submission.job_id}_{index}" if submission.job_id else None

    def end_of(self, state: JobState) -> StopReason | None:
        return command.end_of(state)

    def end_in_queue(self, state: JobState) -> StopReason | None:
        return command.end_in_queue(state)

    def memory_word(self, sweep: Path, submission: Submission, index: int) -> MemoryWord | None:
        return command.memory_word(jobs_folder(sweep), f"{submission.job_id}_{index}")

    def early_end(self, sweep: Path, submission: Submission, index: int) -> str | None:
        # Skip srun's lines: they only give the exit codes of tasks.
        logs = jobs_folder(sweep).glob(f"{submission.job_id}_{index}_*_log.*")
        return early_end(logs, besides="srun: ")

    def place_in(self, environ: Mapping[str, str]) -> ProcessPlace:
        raw, index = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_ARRAY_TASK_ID")
        return ProcessPlace(
            launcher="slurm",
            job_id=raw if index is None else f"{environ['SLURM_ARRAY_JOB_ID']}_{index}",
            raw_job_id=raw,
            restart=int(environ.get("SLURM_RESTART_COUNT") or 0),
            index=None if index is None else int(index),
            ranks=slurm_ranks(environ),
            nodes=tuple(hosts(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", ""))),
        )

    def addresses(self, place: ProcessPlace, environ: Mapping[str, str]) -> Iterator[str]:
        # This process runs on the first node. Networks may not resolve the node's name: then give its address.
        node = environ.get("SLURMD_NODENAME") or place.nodes[0]
        yield node
        if (address := node_address(node)) is not None:
            yield address

    def cores(self, environ: Mapping[str, str]) -> int | None:
        if (cores := environ.get("SLURM_CPUS_PER_TASK")) is not None:
            return int(cores)
        # Without `--cpus-per-task` srun shares the cores of the step on this node evenly.
        ranks, on_node = joined_step(environ), environ.get("SLURM_CPUS_ON_NODE", "")
        return max(1, int(on_node) // ranks.local_world) if ranks is not None and on_node.isdecimal() else None

    def name_job(self, place: ProcessPlace, name: str) -> None:
        # sbatch takes only one name for all elements of an array.
        scontrol("update", f"JobId={place.job_id}", f"JobName={name}", seconds=_SLOW_SECONDS)

    def stop_reason(self, signal_name: str, place: ProcessPlace, *, signal_seconds: float) -> StopReason:
        # Use the id with the array index: the last job's own number is also the number of the whole array.
        facts, job = _job_facts(place.job_id), f"job {place.job_id}"
        state, why, end = facts.get("JobState"), facts.get("Reason"), _seconds(facts.get("EndTime", ""))
        if facts.get("PreemptTime", "None") not in ("None", "Unknown") or state == "PREEMPTED":
            kind, cause = OutcomeKind.PREEMPTED, f"{job} is preempted ({signal_name})"
        elif int(facts.get("Restarts") or 0) > place.restart:
            kind, cause = OutcomeKind.PREEMPTED, f"{job} is put back into the queue ({signal_name})"
        elif why == "NodeDown" or state in ("NODE_FAIL", "BOOT_FAIL"):
            # Not NODE_FAIL: the ranks on other nodes can save. After the job's end, Slurm's state shows the lost node.
            kind, cause = OutcomeKind.PREEMPTED, f"a node of {job} failed ({signal_name})"
        elif why == "TimeLimit" or state == "TIMEOUT":
            kind, cause = OutcomeKind.WALLTIME, f"the time limit of {job} is reached ({signal_name})"
        elif state in ("COMPLETING", "CANCELLED"):
            kind, cause = OutcomeKind.CANCELLED, f"{job} was cancelled ({signal_name})"
        elif end is not None and end - time.time() <= signal_seconds + EARLY_SECONDS:
            left = max(0, round(end - time.time()))
            kind, cause = OutcomeKind.WALLTIME, f"{left} s are left of the time limit of {job} ({signal_name})"
        elif signal_name == signal.SIGTERM.name and facts:
            kind, cause = OutcomeKind.CANCELLED, f"{job} was sent {signal_name}, and Slurm knows no reason"
        else:
            kind, cause = OutcomeKind.PREEMPTED, f"{job} was warned by {signal_name}"
        return StopReason(kind=kind, cause=cause)

    def requeue(self, place: ProcessPlace) -> str | None:
        if int(_job_facts(place.job_id).get("Restarts") or 0) > place.restart:
            return "Slurm has done that already"
        answer = scontrol("requeue", place.job_id, seconds=_REQUEUE_SECONDS)
        if answer is None:
            return "scontrol does not answer"
        return None if answer.code == 0 else answer.complaint

    def lost_nodes(self, place: ProcessPlace) -> frozenset[str]:
        # Slurm removes lost nodes from a job with --no-kill.
        nodes = _job_facts(place.job_id).get("NodeList", "")
        # While the job is put back into the queue, the list is empty or `(null)`.
        return frozenset(place.nodes) - frozenset(hosts(nodes)) if nodes and not nodes.startswith("(") else frozenset()

    def requeue_on_fewer(self, place: ProcessPlace, *, least: int, most: int) -> str | None:
        # Besides nodes, request the tasks and cores of `least` nodes. Slurm changes only requests of jobs in the queue:
        # requeue first. KillWait seconds (30 by default) after the requeue, Slurm ends this process.
        tasks = least * (place.ranks.world // len(place.nodes))
        cores = int(_job_facts(place.job_id).get("CPUs/Task") or 1) * tasks
        if (refused := self.requeue(place)) is not None:
            return refused
        request = (f"NumNodes={least}-{most}", f"NumTasks={tasks}", f"NumCPUs={cores}")
        for _ in range(_TRIES):
            answer = scontrol("update", f"JobId={place.job_id}", *request, seconds=_TIMEOUT_SECONDS)
            if answer is not None and answer.code == 0:
                return None
            # Slurm sends SIGTERM to every process of a job that is requeued, also to scontrol.
            time.sleep(0.2)
        return f"it waits for {most}; {answer.complaint if answer is not None else 'scontrol does not answer'}"

    def ranks_in(self, environ: Mapping[str, str]) -> Ranks | None:
        return joined_step(environ)


def _has_submitit() -> bool:
    return importlib.util.find_spec("submitit") is not None


def joined_step(environ: Mapping[str, str]) -> Ranks | None:
    """The rank of a process that the user's own srun has started as one of several ranks; None for a single process.

    A shell inside an allocation (`salloc`, or the script of `sbatch`) has Slurm's variables too, but no step with
    several tasks.

    Raises:
        ConfigError: one of Slurm's variables is missing or is not a number; or this is a shell on one of several nodes.
    """
    if "SLURM_STEP_ID" not in environ or _slurm_world(environ) <= 1:
        return None
    ranks = slurm_ranks(environ)
    # `srun --ntasks=4 --pty bash`: only the first task has a terminal, and the shells of the others have ended. A shell
    # with job control gives each command its own process group; a command of srun leads its session.
    if "SLURM_PTY_PORT" in environ and ranks.rank == 0 and os.getpgrp() != os.getsid(0):
        if ranks.local_world < ranks.world:
            rule = f"is a shell on one of several nodes: its {ranks.world - 1} other tasks do not run titanlab"
            cure = "leave the shell, and try: salloc …, then srun titanlab train …"
            raise ConfigError("SLURM_STEP_NUM_TASKS", ranks.world, rule, cure)
        return None
    if "MASTER_ADDR" in environ:
        return ranks
    if ranks.local_world == ranks.world:
        return replace(ranks, address="127.0.0.1")
    try:
        socket.getaddrinfo(ranks.address, None)
    except OSError:
        return replace(ranks, address=node_address(ranks.address) or ranks.address)
    return ranks


def slurm_ranks(environ: Mapping[str, str]) -> Ranks:
    """The rank of a task of srun, also of a single task.

    Raises:
        ConfigError: one of Slurm's variables is missing or is not a number.
    """
    world = _slurm_world(environ)
    # Tasks of each node of the step: `4(x2),3`.
    counts: list[int] = []
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE", "1"))
    for match in re.finditer(r"(\d+)(?:\(x(\d+)\))?(?:,|$)", tasks):
        counts += [int(match[1])] * int(match[2] or 1)
    node = number(environ, "SLURM_NODEID", 0)
    # A task that sees only one GPU has it alone if a variable of _GPUS_OF_A_TASK is set, or if the driver shows several
    # GPUs: it shows all GPUs of the node (in a container perhaps not).
    is_bound = world > 1 and "CUDA_VISIBLE_DEVICES" in environ
    return Ranks(
        rank=number(environ, "SLURM_PROCID"),
        world=world,
        local_rank=number(environ, "SLURM_LOCALID"),
        local_world=counts[node] if node < len(counts) else 1,
        address=environ.get("MASTER_ADDR") or [*hosts(environ.get("SLURM_STEP_NODELIST", "")), "127.0.0.1"][0],
        port=number(environ, "MASTER_PORT", _port(environ)),
        started_by="slurm",
        is_counted=True,
        has_own_gpu=is_bound and (any(name in environ for name in _GPUS_OF_A_TASK) or gpus() > 1),
    )


def _slurm_world(environ: Mapping[str, str]) -> int:
    return number(environ, "SLURM_STEP_NUM_TASKS", number(environ, "SLURM_NTASKS", 1))


def _port(environ: Mapping[str, str]) -> int:
    """The port of one step: jobs that share a node need different ports, and so do the steps of one job.

    All ranks of the step compute the same port. It lies below the ports that Linux gives to outgoing connections. Two
    jobs whose numbers differ by less than 12,768 have different ports in their first step. So have the first 97 steps
    of a job and those of the next job.
    """
    job, step = number(environ, "SLURM_JOB_ID", 0), number(environ, "SLURM_STEP_ID", 0)
    return 20_000 + (97 * job + step) % 12_768


def _undecided(problem: str | None) -> ConfigError:
    rule = f"Slurm does not answer, and an earlier submission may have reached it ({problem})"
    return ConfigError("launch", "slurm", rule, "try again when `squeue` and `sacct` answer; nothing was submitted")


def _job_facts(job: str) -> Mapping[str, str]:
    """The output of `scontrol show job`, for values without spaces; empty if Slurm does not answer."""
    for _ in range(_TRIES):
        answer = scontrol("show", "job", "--oneliner", job, seconds=_TIMEOUT_SECONDS)
        if answer is not None and answer.code == 0 and "JobState=" in answer.output:
            return dict(word.split("=", 1) for word in answer.output.split() if "=" in word)
        time.sleep(0.2)
    return {}


def _seconds(text: str) -> float | None:
    """Slurm's time, which `scontrol` prints in UTC, in seconds since the epoch; None for text that is not a time."""
    with contextlib.suppress(ValueError):
        return calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    return None
