"""The ranks of a process that srun has started, from Slurm's variables."""

from __future__ import annotations

import itertools
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import replace

from titanlab.distributed.host import gpus
from titanlab.distributed.ranks import Ranks, check_ranks, number
from titanlab.errors import ConfigError
from titanlab.launch.slurm.command import node_address

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
