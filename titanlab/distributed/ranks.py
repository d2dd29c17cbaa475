"""The rank of a process, from variables that torchrun or titanlab's launcher sets; ports and loopback of this host."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import random
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from titanlab.errors import ConfigError

# Private environment variables between processes of titanlab. This list is complete.
PARENT = "TITANLAB_PARENT"  # process number of a rank's launcher; the launcher's death is a stop request
ATTEMPT = "TITANLAB_ATTEMPT"  # number of the attempt that the launcher has begun; not set under torchrun
LOG = "TITANLAB_LOG"  # file to which a rank appends its output; without it, the rank writes to the launcher's output
CORES = "TITANLAB_CORES"  # cores for each process, which cannot see whether other processes share its cores
PIDS_FILE = "TITANLAB_PIDS_FILE"  # descriptor of the file into which the forking process writes its ranks' pids
QUESTIONS = "TITANLAB_SCONTROL"  # folder in which the batch file of a job looks for questions to Slurm
_OWN_GPU = "TITANLAB_OWN_GPU"  # set if a process has a GPU of its own, see `Ranks`
# Variables with the address at which the ranks of a run meet; another run must not inherit them.
MEETING = ("MASTER_ADDR", "MASTER_PORT")
_LOOK_SECONDS = 0.2
_LOOK_SECONDS_A_RANK = 0.004


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """A process's rank in a run. ConfigError: a number is outside its range."""

    rank: int  # its number among all processes
    world: int  # the number of processes
    local_rank: int  # its number on its host
    local_world: int  # the number of processes on its host
    address: str  # where rank 0 listens
    port: int
    started_by: str  # `torchrun` (or titanlab's launcher, which sets the same variables), or the kind of a launcher
    # whether the launcher has counted the ranks of each host, so that `local_world` is reliable.
    is_counted: bool = False
    # whether the launcher has given each process of a host a GPU of its own: if such a process sees only one GPU, no
    # other process uses that GPU.
    has_own_gpu: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            cure = "start the processes with torchrun or srun"
            raise ConfigError("RANK", self.rank, f"must lie in [0, {self.world})", cure)
        if not 0 <= self.port < 65_536:
            raise ConfigError("MASTER_PORT", self.port, "is not a port", "try MASTER_PORT=29500")

    def environment(self) -> dict[str, str]:
        """The environment variables of this rank: those that torch reads, and one of titanlab's."""
        return {
            **({_OWN_GPU: "1"} if self.has_own_gpu else {}),
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


ALONE = Ranks(rank=0, world=1, local_rank=0, local_world=1, address="127.0.0.1", port=0, started_by="nobody")


def look_seconds(world: int, *, is_first: bool = True) -> float:
    """Seconds between two looks of a rank for files that others write into the run's folder.

    The ranks of a large job look less often, to spare a shared file system. Ranks that are not the first on their host
    (`is_first`) look even less often: ranks agree on a stop in each step, so it is enough if one rank knows of it.
    """
    seconds = _LOOK_SECONDS + _LOOK_SECONDS_A_RANK * (world - 1)
    return seconds if is_first else 4 * seconds


def joined(environ: Mapping[str, str]) -> Ranks | None:
    """This process's rank, from torchrun's variables; None for a process without these variables.

    Raises:
        ConfigError: one of the variables is missing, or is not a number in its range.
    """
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    rank, world = number(environ, "RANK"), number(environ, "WORLD_SIZE")
    return Ranks(
        rank=rank,
        world=world,
        local_rank=number(environ, "LOCAL_RANK", rank),
        local_world=number(environ, "LOCAL_WORLD_SIZE", world),
        address=environ.get("MASTER_ADDR", "127.0.0.1"),
        port=number(environ, "MASTER_PORT", None if world > 1 else 0),
        started_by="torchrun",
        has_own_gpu=_OWN_GPU in environ,
    )


def number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """The whole number in an environment variable. ConfigError: it is missing and has no default, or is no number."""
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None:
        cure = "start with torchrun or srun, or unset RANK"
        raise ConfigError(name, None, "is not set, while others of its set are", cure)
    try:
        return int(text)
    except ValueError:
        raise ConfigError(name, text, "must be a whole number", "start with torchrun or srun, or unset it") from None


# In this file Linux shows the range of ports for outgoing connections. On other systems, assume that the range begins
# at its usual start.
_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_USUAL_START = 49152
_LOWEST = 20_000
_TRIES = 100


def free_port() -> int:
    """A TCP port of this host that can be bound now, on all addresses.

    If possible, the port is outside the range of ports for outgoing connections: the kernel may give a port of that
    range to a connection before rank 0 listens on it, a second or more later.
    """
    try:
        below = int(_RANGE_FILE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        below = _USUAL_START
    draw = random.SystemRandom().randrange
    for port in [*(draw(_LOWEST, below) for _ in range(_TRIES if below > _LOWEST else 0)), 0]:
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return int(probe.getsockname()[1])
    raise OSError("no TCP port of this host is free")


LOOPBACK = "127.0.0.1"
_INTERFACES = ("lo", "lo0")  # Linux; macOS and the BSDs


def is_loopback(address: str) -> bool:
    """Whether an address, or all addresses of a name, are this host's loopback."""
    with contextlib.suppress(OSError, ValueError, UnicodeError):
        addresses = [ipaddress.ip_address(info[4][0]) for info in socket.getaddrinfo(address, None)]
        return bool(addresses) and all(ip.is_loopback for ip in addresses)
    return False


def loopback_interface() -> str | None:
    """The name of the loopback interface; None: unknown."""
    return next((name for _, name in socket.if_nameindex() if name in _INTERFACES), None)


def listen(address: str, port: int) -> socket.socket:
    """A socket that listens on this address only; OSError: another process has the port."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        # Without this, connections of a run that has just ended (state TIME_WAIT) would block the port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen at {address}:{port} ({error.strerror})") from error
    return listener


def is_one_host(ranks: Ranks, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether all ranks are known to be on this host.

    Ranks started by hand may lack LOCAL_WORLD_SIZE; then `local_world` is only a default and proves nothing.
    """
    is_counted = ranks.is_counted or "TORCHELASTIC_RUN_ID" in environ
    return is_loopback(ranks.address) or (is_counted and ranks.local_world == ranks.world)
