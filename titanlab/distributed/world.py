"""What a rank finds at start: device, process group, seeds."""

from __future__ import annotations

import contextlib
import datetime
import importlib
import os
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import torch.distributed as dist

from titanlab.distributed.loopback import is_one_host, listen, loopback_address, loopback_interface
from titanlab.distributed.ranks import Ranks
from titanlab.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class World:
    """One rank of a run: its number, its device, and small collectives.

    Attributes:
        rank, world: its number among all processes, and the number of processes.
        local_rank: its number on its host.
        device: where it computes.
        group: of its collectives; None: the group of all training.
        without_data: the context in which parameters become tensors without data, for a trace; None: they are real.
    """

    rank: int
    world: int
    local_rank: int
    device: torch.device
    group: dist.ProcessGroup | None = None
    without_data: AbstractContextManager[object] | None = None

    @property
    def logs(self) -> bool:
        """True on the one rank that writes metrics and prints."""
        return self.rank == 0

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The values summed over all ranks, in place."""
        if self.world > 1:
            dist.all_reduce(values, group=self.group)
        return values

    def gather(self, value: T) -> list[T]:
        """A small picklable value of every rank, by rank, on every rank."""
        if self.world == 1:
            return [value]
        values: list[T] = [value] * self.world
        dist.all_gather_object(values, value, group=self.group)
        return values

    def collect(self, value: T) -> list[T]:
        """A picklable value of every rank, by rank, on rank 0; an empty list on the others."""
        if self.world == 1:
            return [value]
        values: list[T] | None = [value] * self.world if self.logs else None
        dist.gather_object(value, values, dst=0, group=self.group)
        return values or []

    def scatter(self, values: list[T]) -> T:
        """This rank's value of those that rank 0 gives, by rank."""
        if self.world == 1:
            return values[0]
        own: list[T | None] = [None]
        dist.scatter_object_list(own, values if self.logs else None, src=0, group=self.group)
        return own[0]  # type: ignore[return-value]

    def share(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        if self.world == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def beside(self) -> World:
        """The same ranks with a group of their own, on the host, for another thread; all ranks call it together.

        Collectives of two threads must not mix in one group. The watchdog limits how long the training waits for the
        thread, so the group has no limit of its own.
        """
        if self.world == 1:
            return self
        group = dist.new_group(backend="gloo", timeout=_NO_LIMIT, group_desc=BESIDE)
        return replace(self, group=group)


BESIDE = "beside"
"""Description of the group of `World.beside`: its collectives are no part of a step."""
_JOIN_TIMEOUT = datetime.timedelta(minutes=10)
_NO_LIMIT = datetime.timedelta(days=30)


@contextlib.contextmanager
def open_world(ranks: Ranks, *, accelerator: str, seed: int, deterministic: bool) -> Iterator[World]:
    """Join the process group, select the device, seed every generator; leave the group at the end.

    Raises:
        ConfigError: the accelerator that the recipe names is missing.
    """
    device = _select_device(accelerator, ranks)
    random.seed(seed)
    with contextlib.suppress(ImportError):
        # For third-party code that draws from NumPy's global generator; titanlab itself does not.
        importlib.import_module("numpy").random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    _join(ranks, device)
    try:
        yield World(rank=ranks.rank, world=ranks.world, local_rank=ranks.local_rank, device=device)
    finally:
        if deterministic:
            torch.use_deterministic_algorithms(False)
        if dist.is_initialized():
            dist.destroy_process_group()


def _select_device(accelerator: str, ranks: Ranks) -> torch.device:
    local_rank = ranks.local_rank
    if accelerator == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            "cluster.accelerator",
            accelerator,
            f"this host shows a GPU, but torch {torch.__version__} cannot use it",
            "install a CUDA build of torch, or try cluster.accelerator=cpu",
        )
    if ranks.has_own_gpu and torch.cuda.device_count() == 1:
        # CUDA numbers what a process sees from 0.
        local_rank = 0
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            "world",
            local_rank + 1,
            f"more processes on this host than its {torch.cuda.device_count()} GPUs",
            f"try world={torch.cuda.device_count()}",
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _join(ranks: Ranks, device: torch.device) -> None:
    if is_one_host(ranks):
        _keep_gloo_on_loopback()
    if ranks.world == 1:
        # No address and no port, so that several runs can share a host.
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "nccl", store=dist.HashStore(), rank=0, world_size=1
        )
        return
    # Objects and CPU tensors need gloo, also where CUDA tensors use NCCL.
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    store = _store_on_loopback(ranks)
    dist.init_process_group(
        backend,
        init_method=None if store is not None else f"tcp://{ranks.address}:{ranks.port}",
        store=store,
        rank=ranks.rank,
        world_size=ranks.world,
        timeout=_JOIN_TIMEOUT,
        device_id=device if device.type == "cuda" else None,
    )


def _store_on_loopback(ranks: Ranks) -> dist.TCPStore | None:
    """The store of ranks that are all on this host; None: torch creates a store that other hosts can reach.

    torch's store listens on all addresses of the host; anyone who reaches it can read and change what ranks exchange.
    """
    # torchrun's agent provides a store.
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or not is_one_host(ranks):
        return None
    address = loopback_address()
    if address is None:
        return None
    is_master = ranks.rank == 0
    # `detach`, because the store closes the descriptor.
    listener = listen(address, ranks.port).detach() if is_master else None
    return dist.TCPStore(
        address,
        ranks.port,
        world_size=ranks.world,
        is_master=is_master,
        timeout=_JOIN_TIMEOUT,
        master_listen_fd=listener,
    )


def _keep_gloo_on_loopback() -> None:
    """Let gloo listen on the loopback, as all ranks are on this host; a setting of the user wins."""
    interface = loopback_interface()
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
