"""Which rank a process is: what torchrun, Slurm or our own launcher put into its environment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from titanlab.errors import ConfigError

# Variables that say where the ranks of a run meet; those of this process are not for another run.
MEETING = ("MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """A process's place among the processes of a run.

    Attributes:
        rank, world: its number among all processes, and how many there are.
        local_rank, local_world: the same on its host.
        address, port: where rank 0 listens.
        started_by: `torchrun` (or our launcher, which sets the same variables) or `slurm`.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int
    address: str
    port: int
    started_by: str

    def environment(self) -> dict[str, str]:
        """The variables that torch reads."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


ALONE = Ranks(rank=0, world=1, local_rank=0, local_world=1, address="127.0.0.1", port=0, started_by="nobody")


def joined(environ: Mapping[str, str]) -> Ranks | None:
    """The rank that somebody started this process as, or None for a process on its own.

    A shell inside an allocation (`salloc`, or the script of `sbatch`) has Slurm's variables too, but
    no step with several tasks: it is on its own.

    Raises:
        ConfigError: a variable that belongs to the set is missing or is no number.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        rank, world = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
        ranks = Ranks(
            rank=rank,
            world=world,
            local_rank=_number(environ, "LOCAL_RANK", rank),
            local_world=_number(environ, "LOCAL_WORLD_SIZE", world),
            address=environ.get("MASTER_ADDR", "127.0.0.1"),
            port=_number(environ, "MASTER_PORT", None if world > 1 else 0),
            started_by="torchrun",
        )
    elif "SLURM_STEP_ID" in environ and _slurm_world(environ) > 1:
        ranks = slurm_ranks(environ)
    else:
        return None
    if not 0 <= ranks.rank < ranks.world:
        raise ConfigError(
            "RANK", ranks.rank, f"must lie in [0, {ranks.world})", "start the processes with torchrun or srun"
        )
    if not 0 <= ranks.port < 65_536:
        raise ConfigError("MASTER_PORT", ranks.port, "is no port", "try MASTER_PORT=29500")
    return ranks


def slurm_ranks(environ: Mapping[str, str]) -> Ranks:
    """The rank of a task of srun's, also of a single one.

    Raises:
        ConfigError: a variable that belongs to the set is missing or is no number.
    """
    return Ranks(
        rank=_number(environ, "SLURM_PROCID"),
        world=_slurm_world(environ),
        local_rank=_number(environ, "SLURM_LOCALID"),
        local_world=_slurm_local_world(environ),
        address=environ.get("MASTER_ADDR") or [*hosts(environ.get("SLURM_STEP_NODELIST", "")), "127.0.0.1"][0],
        # Steps of one job, and jobs that share a node, must not meet at one port.
        port=_number(environ, "MASTER_PORT", 20_000 + _number(environ, "SLURM_JOB_ID", 0) % 20_000),
        started_by="slurm",
    )


def submitit_ranks(environ: Mapping[str, str]) -> Ranks:
    """The rank of a task that submitit's local controller has started.

    Raises:
        ConfigError: a variable that belongs to the set is missing or is no number.
    """
    world = _number(environ, "SUBMITIT_LOCAL_NTASKS")
    return Ranks(
        rank=_number(environ, "SUBMITIT_LOCAL_GLOBALID"),
        world=world,
        local_rank=_number(environ, "SUBMITIT_LOCAL_LOCALID"),
        # It knows one host only.
        local_world=world,
        address="127.0.0.1",
        port=0,
        started_by="local",
    )


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None:
        if default is None:
            raise ConfigError(
                name, None, "is not set, while others of its set are", "start with torchrun or srun, or unset RANK"
            )
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError(name, text, "must be a whole number", "start with torchrun or srun, or unset it") from None


def _slurm_world(environ: Mapping[str, str]) -> int:
    return _number(environ, "SLURM_STEP_NUM_TASKS", _number(environ, "SLURM_NTASKS", 1))


def _slurm_local_world(environ: Mapping[str, str]) -> int:
    """Tasks on this node: `SLURM_STEP_TASKS_PER_NODE` reads `4(x2),3`."""
    node = _number(environ, "SLURM_NODEID", 0)
    counts: list[int] = []
    for part in environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE", "1")).split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match:
            counts += [int(match[1])] * int(match[2] or 1)
    return counts[node] if node < len(counts) else 1


def hosts(nodes: str) -> list[str]:
    """The hosts of Slurm's short form: `gpu[03-04,12],n1` → gpu03, gpu04, gpu12, n1."""
    names_of_hosts: list[str] = []
    for prefix, inner, suffix in re.findall(r"([^,\[]+)(?:\[([^]]*)\])?([^,\[]*)", nodes):
        for part in inner.split(",") if inner else [""]:
            first, _, last = part.partition("-")
            numbers = range(int(first), int(last or first) + 1) if first.isdecimal() else None
            names = [""] if numbers is None else [f"{number:0{len(first)}d}" for number in numbers]
            names_of_hosts += [f"{prefix}{name}{suffix}" for name in names]
    return names_of_hosts
