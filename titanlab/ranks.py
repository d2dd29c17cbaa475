"""Which rank a process is: what torchrun, Slurm or our own launcher put into its environment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from titanlab.errors import ConfigError


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
        world = _slurm_world(environ)
        ranks = Ranks(
            rank=_number(environ, "SLURM_PROCID"),
            world=world,
            local_rank=_number(environ, "SLURM_LOCALID"),
            local_world=_slurm_local_world(environ),
            address=environ.get("MASTER_ADDR") or _first_host(environ.get("SLURM_STEP_NODELIST", "127.0.0.1")),
            # Steps of one job, and jobs that share a node, must not meet at one port.
            port=_number(environ, "MASTER_PORT", 20_000 + _number(environ, "SLURM_JOB_ID", 0) % 20_000),
            started_by="slurm",
        )
    else:
        return None
    if not 0 <= ranks.rank < ranks.world:
        raise ConfigError(
            "RANK", ranks.rank, f"must lie in [0, {ranks.world})", "start the processes with torchrun or srun"
        )
    if not 0 <= ranks.port < 65_536:
        raise ConfigError("MASTER_PORT", ranks.port, "is no port", "try MASTER_PORT=29500")
    return ranks


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


def _first_host(nodes: str) -> str:
    """First host of Slurm's short form: `gpu[03-07,12]` → `gpu03`."""
    match = re.match(r"([^,\[]+)(?:\[(\d+))?", nodes)
    return f"{match[1]}{match[2] or ''}" if match else "127.0.0.1"
