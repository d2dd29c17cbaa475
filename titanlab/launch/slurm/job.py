"""What a process of a job asks Slurm: its rank and place, the meaning of a signal, a requeue, an address.

Slurm sends the same signals for a preemption, a time limit and a cancellation. Observed with Slurm 22.05: during the
grace time of a preemption `PreemptTime` is set; after a requeue `Restarts` is one higher; after the time limit the
reason is `TimeLimit`; after a node failure it is `NodeDown`; a job that scancel ends is `COMPLETING` without any of
these. Warnings before a time limit come up to a minute early. A job submitted with --no-kill stays on its other nodes
when a node fails, also when that was its first one: then its batch script is gone, and only its time limit ends it.
"""

from __future__ import annotations

import calendar
import itertools
import os
import re
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace

from titanlab.distributed.host import gpus
from titanlab.distributed.ranks import Ranks, check_ranks, number
from titanlab.errors import ConfigError
from titanlab.launch.contract import ProcessPlace, StopReason
from titanlab.launch.slurm.command import node_address, scontrol
from titanlab.records.outcome import OutcomeKind

# Slurm sets them for --gpus-per-task and --gpu-bind.
_GPUS_OF_A_TASK = ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_GPU_BIND")


def joined_step(environ: Mapping[str, str]) -> Ranks | None:
    """The rank of a process that the user's own srun has started as one of several; None for a single process.

    A shell inside an allocation (`salloc`, or the script of `sbatch`) has Slurm's variables too, but no step with
    several tasks.

    Raises:
        ConfigError: one of Slurm's variables is missing or is not a number; or it is a shell on one of several nodes.
    """
    if "SLURM_STEP_ID" not in environ or _slurm_world(environ) <= 1:
        return None
    ranks = slurm_ranks(environ)
    # `srun --ntasks=4 --pty bash`: only the first task has a terminal, and the shells of the others have ended. A shell
    # with job control gives each command a process group of its own; a command of srun leads its session.
    if "SLURM_PTY_PORT" in environ and ranks.rank == 0 and os.getpgrp() != os.getsid(0):
        if ranks.local_world < ranks.world:
            rule = f"is a shell on one of several nodes: its {ranks.world - 1} other tasks do not run titanlab"
            cure = "leave the shell, and try: salloc …, then srun titanlab train …"
            raise ConfigError("SLURM_STEP_NUM_TASKS", ranks.world, rule, cure)
        return None
    check_ranks(ranks)
    if "MASTER_ADDR" in environ:
        return ranks
    return replace(ranks, address="127.0.0.1" if ranks.local_world == ranks.world else _reachable(ranks.address))


def _reachable(node: str) -> str:
    """The name of a node, or the address by which Slurm reaches it if its name does not resolve."""
    try:
        socket.getaddrinfo(node, None)
    except OSError:
        return node_address(node) or node
    return node


def slurm_ranks(environ: Mapping[str, str]) -> Ranks:
    """The rank of a task of srun, also of a single task.

    Raises:
        ConfigError: one of Slurm's variables is missing or is not a number.
    """
    return Ranks(
        rank=number(environ, "SLURM_PROCID"),
        world=_slurm_world(environ),
        local_rank=number(environ, "SLURM_LOCALID"),
        local_world=_slurm_local_world(environ),
        address=environ.get("MASTER_ADDR") or [*hosts(environ.get("SLURM_STEP_NODELIST", "")), "127.0.0.1"][0],
        port=number(environ, "MASTER_PORT", _port(environ)),
        started_by="slurm",
        is_counted=True,
        has_own_gpu=_has_own_gpu(environ),
    )


def _port(environ: Mapping[str, str]) -> int:
    """The port of one step: jobs that share a node need different ones, and so do the steps of one job.

    All ranks of the step compute it. It lies below the ports that Linux gives to outgoing connections. Two jobs whose
    numbers differ by less than 12,768 never share the port of their first step, nor do the first 97 steps of a job and
    those of the next one.
    """
    job, step = number(environ, "SLURM_JOB_ID", 0), number(environ, "SLURM_STEP_ID", 0)
    return 20_000 + (97 * job + step) % 12_768


def _has_own_gpu(environ: Mapping[str, str]) -> bool:
    """Whether the only GPU that this task sees is its own, and no other task's of its node."""
    if _slurm_world(environ) == 1 or "CUDA_VISIBLE_DEVICES" not in environ:
        return False
    # If no variable tells it, the driver shows more GPUs than the task sees; in a container it may not.
    return any(name in environ for name in _GPUS_OF_A_TASK) or gpus() > 1


def _slurm_world(environ: Mapping[str, str]) -> int:
    return number(environ, "SLURM_STEP_NUM_TASKS", number(environ, "SLURM_NTASKS", 1))


def _slurm_local_world(environ: Mapping[str, str]) -> int:
    """Tasks on this node: `SLURM_STEP_TASKS_PER_NODE` reads `4(x2),3`."""
    node = number(environ, "SLURM_NODEID", 0)
    counts: list[int] = []
    for part in environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE", "1")).split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match:
            counts += [int(match[1])] * int(match[2] or 1)
    return counts[node] if node < len(counts) else 1


def hosts(nodes: str) -> list[str]:
    """The hosts of Slurm's short form: `gpu[03-04,12],n1` → gpu03, gpu04, gpu12, n1; also with several brackets."""
    names: list[str] = []
    for word in re.findall(r"(?:[^,\[]|\[[^]]*\])+", nodes):
        # Every second part was inside brackets.
        parts = re.split(r"\[([^]]*)\]", word)
        choices = [_numbers(part) if place % 2 else [part] for place, part in enumerate(parts)]
        names += ["".join(chosen) for chosen in itertools.product(*choices)]
    return names


def _numbers(text: str) -> list[str]:
    """The numbers of `03-04,12`, with their leading zeros."""
    numbers: list[str] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (not last or last.isdecimal()):
            numbers += [f"{value:0{len(first)}d}" for value in range(int(first), int(last or first) + 1)]
        else:
            numbers.append(part)
    return numbers


EARLY_SECONDS = 75.0
_TIMEOUT_SECONDS = 20.0
_SLOW_SECONDS = 30.0
_REQUEUE_SECONDS = 60.0
_TRIES = 3


def place_in(environ: Mapping[str, str]) -> ProcessPlace:
    """The place that srun has given to this process.

    Raises:
        ConfigError: a variable is missing or is not a number.
    """
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


def addresses(place: ProcessPlace, environ: Mapping[str, str]) -> Iterator[str]:
    """The name of the first node, on which this process runs, then the address by which Slurm reaches it."""
    node = environ.get("SLURMD_NODENAME") or place.nodes[0]
    yield node
    if (address := node_address(node)) is not None:
        yield address


def stop_reason(name: str, place: ProcessPlace, *, signal_seconds: float) -> StopReason:
    """The meaning of a signal of this name, according to Slurm's information on the job."""
    # Use the id with the array index: the last job's own number is also the number of the whole array.
    facts, job = _job_facts(place.job_id), f"job {place.job_id}"
    if facts.get("PreemptTime", "None") not in ("None", "Unknown") or facts.get("JobState") == "PREEMPTED":
        return StopReason(kind=OutcomeKind.PREEMPTED, cause=f"{job} is preempted ({name})")
    if int(facts.get("Restarts") or 0) > place.restart:
        return StopReason(kind=OutcomeKind.PREEMPTED, cause=f"{job} is put back into the queue ({name})")
    if facts.get("Reason") == "NodeDown" or facts.get("JobState") in ("NODE_FAIL", "BOOT_FAIL"):
        # The other nodes can save; the scheduler reports the lost node after the end.
        return StopReason(kind=OutcomeKind.PREEMPTED, cause=f"a node of {job} failed ({name})")
    if facts.get("Reason") == "TimeLimit" or facts.get("JobState") == "TIMEOUT":
        return StopReason(kind=OutcomeKind.WALLTIME, cause=f"the time limit of {job} is reached ({name})")
    if facts.get("JobState") in ("COMPLETING", "CANCELLED"):
        return StopReason(kind=OutcomeKind.CANCELLED, cause=f"{job} was cancelled ({name})")
    end = _seconds(facts.get("EndTime", ""))
    if end is not None and end - time.time() <= signal_seconds + EARLY_SECONDS:
        left = max(0, round(end - time.time()))
        return StopReason(kind=OutcomeKind.WALLTIME, cause=f"{left} s are left of the time limit of {job} ({name})")
    if name == signal.SIGTERM.name and facts:
        return StopReason(kind=OutcomeKind.CANCELLED, cause=f"{job} was sent {name}, and Slurm knows no reason")
    return StopReason(kind=OutcomeKind.PREEMPTED, cause=f"{job} was warned by {name}")


def requeue(place: ProcessPlace) -> str | None:
    """Put this process's job back into Slurm's queue. Returns why that failed; None if it worked."""
    if int(_job_facts(place.job_id).get("Restarts") or 0) > place.restart:
        return "Slurm has done that already"
    answer = scontrol("requeue", place.job_id, seconds=_REQUEUE_SECONDS)
    if answer is None:
        return "scontrol does not answer"
    return None if answer.code == 0 else answer.complaint


def lost_nodes(place: ProcessPlace) -> frozenset[str]:
    """The nodes that a job with --no-kill has lost: Slurm takes them from its list."""
    nodes = _job_facts(place.job_id).get("NodeList", "")
    # While the job is put back into the queue, the list is empty or `(null)`.
    return frozenset(place.nodes) - frozenset(hosts(nodes)) if nodes and not nodes.startswith("(") else frozenset()


def requeue_on_fewer(place: ProcessPlace, *, least: int, most: int) -> str | None:
    """Put this process's job back into Slurm's queue, and change its request to a range of nodes.

    The request also has the tasks and the cores of the fewest nodes. Slurm changes the request of a job in the queue
    only, and ends this process KillWait seconds after it has requeued its job (30 by default).

    Returns:
        why the job is not in the queue, or waits for all of its nodes; None if all worked.
    """
    tasks = least * (place.ranks.world // len(place.nodes))
    cores = int(_job_facts(place.job_id).get("CPUs/Task") or 1) * tasks
    if (refused := requeue(place)) is not None:
        return refused
    request = (f"NumNodes={least}-{most}", f"NumTasks={tasks}", f"NumCPUs={cores}")
    for _ in range(_TRIES):
        answer = scontrol("update", f"JobId={place.job_id}", *request, seconds=_TIMEOUT_SECONDS)
        if answer is not None and answer.code == 0:
            return None
        # Slurm sends SIGTERM to every process of a job that is requeued: to scontrol too, if it runs at that moment.
        time.sleep(0.2)
    return f"it waits for {most}; {answer.complaint if answer is not None else 'scontrol does not answer'}"


def name_job(place: ProcessPlace, name: str) -> None:
    """Give a running element of an array its own name, if Slurm allows that to the job's owner.

    sbatch takes only one name for all elements of an array.
    """
    scontrol("update", f"JobId={place.job_id}", f"JobName={name}", seconds=_SLOW_SECONDS)


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
    try:
        return calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None
