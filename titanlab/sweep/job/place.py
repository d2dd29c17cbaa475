"""A process's place in a job: which job, which of its starts, which rank on which node."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from titanlab.distributed.ranks import Ranks, hosts, slurm_ranks, submitit_ranks
from titanlab.errors import ConfigError
from titanlab.system.command import ask, output_of

_LOOPBACK = "127.0.0.1"
_TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class Place:
    """A process's place in its job.

    Attributes:
        launcher: `slurm` or `local`.
        job_id: as the queue shows it, with the place in the array: `12_3`.
        raw_job_id: the number of this job alone in the accounting; commands take the last one's for the whole array.
        restart: how often the job was put back into the queue.
        index: its place in the array; None: it is in none.
        ranks: of this process; without an address.
        nodes: names of the job's nodes.
    """

    launcher: str
    job_id: str
    raw_job_id: str
    restart: int
    index: int | None
    ranks: Ranks
    nodes: tuple[str, ...]

    @property
    def start(self) -> str:
        """What all processes of one start of the job share, and those of no other."""
        return f"{self.launcher}:{self.raw_job_id}.{self.restart}"


def place_in(environ: Mapping[str, str]) -> Place:
    """The place that submitit's controller or srun gave this process; without either, it is a job of its own.

    Raises:
        ConfigError: a variable is no number.
    """
    if environ.get("SUBMITIT_EXECUTOR") == "local" and "SUBMITIT_LOCAL_JOB_ID" in environ:
        number = environ["SUBMITIT_LOCAL_JOB_ID"]
        ranks, nodes = submitit_ranks(environ), (socket.gethostname(),)
        return Place(
            launcher="local", job_id=number, raw_job_id=number, restart=0, index=None, ranks=ranks, nodes=nodes
        )
    if "SLURM_PROCID" in environ and "SLURM_JOB_ID" in environ:
        raw, place = environ["SLURM_JOB_ID"], environ.get("SLURM_ARRAY_TASK_ID")
        return Place(
            launcher="slurm",
            job_id=raw if place is None else f"{environ['SLURM_ARRAY_JOB_ID']}_{place}",
            raw_job_id=raw,
            restart=int(environ.get("SLURM_RESTART_COUNT") or 0),
            index=None if place is None else int(place),
            ranks=slurm_ranks(environ),
            nodes=tuple(hosts(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", ""))),
        )
    alone = Ranks(rank=0, world=1, local_rank=0, local_world=1, address=_LOOPBACK, port=0, started_by="local")
    number = str(os.getpid())
    return Place(
        launcher="local",
        job_id=number,
        raw_job_id=number,
        restart=0,
        index=None,
        ranks=alone,
        nodes=(socket.gethostname(),),
    )


def address_of(place: Place, environ: Mapping[str, str]) -> str:
    """Where rank 0, this process, can be reached by all ranks: a given address, its node's name, or Slurm's address.

    Raises:
        ConfigError: nothing of that leads anywhere.
    """
    given = environ.get("MASTER_ADDR")
    if given:
        return given
    if len(place.nodes) <= 1:
        return _LOOPBACK
    node = environ.get("SLURMD_NODENAME") or place.nodes[0]
    for name in (node, node_address(node)):
        if name is None:
            continue
        try:
            socket.getaddrinfo(name, None)
        except OSError:
            continue
        return name
    rule = f"the first node, {node}, has no address that this host can resolve"
    raise ConfigError("MASTER_ADDR", None, rule, "set MASTER_ADDR in launch.environment")


def node_address(node: str) -> str | None:
    """The address by which Slurm itself reaches a node, where names of nodes mean nothing to the network."""
    told = output_of("scontrol", "show", "node", "--oneliner", node, seconds=_TIMEOUT_SECONDS) or ""
    match = re.search(r"\bNodeAddr=(\S+)", told)
    return match[1] if match else None


def give_name(place: Place, name: str) -> None:
    """Call a running element of an array by its own name, where Slurm lets its owner do that.

    All elements have the array's name until they start: one name is all that sbatch takes.
    """
    ask("scontrol", "update", f"JobId={place.job_id}", f"JobName={name}", seconds=_TIMEOUT_SECONDS)


def free_port(environ: Mapping[str, str]) -> int:
    """A port of this host that nobody has: the given one, or one that could be bound a moment ago.

    Raises:
        ConfigError: the given one is no number.
    """
    given = environ.get("MASTER_PORT")
    if given:
        if not given.isdecimal() or not 0 < int(given) < 65_536:
            raise ConfigError("MASTER_PORT", given, "is no port", "try MASTER_PORT=29500, or unset it")
        return int(given)
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
