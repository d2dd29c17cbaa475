"""What a rank sets up at its start: device, process group, seeds."""

from __future__ import annotations

import contextlib
import datetime
import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

from titanlab.distributed.ranks import LOOPBACK, Ranks, is_one_host, listen, loopback_interface
from titanlab.distributed.stop import StoppedEarly
from titanlab.errors import ConfigError, TitanlabError
from titanlab.records import named

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class World:
    """One rank of a run: its number, its device, and small collectives."""

    rank: int  # its number among all processes
    world: int  # the number of processes
    local_rank: int  # its number on its host
    device: torch.device
    group: dist.ProcessGroup | None = None  # the process group of these collectives; None: torch's default group
    # for a trace: the context in which parameters become tensors without data; None: they get data.
    without_data: AbstractContextManager[object] | None = None

    @property
    def logs(self) -> bool:
        """True on the one rank that writes metrics and prints."""
        return self.rank == 0

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum the values over all ranks, in place. Returns the same tensor."""
        if self.world > 1:
            dist.all_reduce(values, group=self.group)
        return values

    def gather(self, value: T) -> list[T]:
        """Gather a small picklable value of every rank. Returns the values by rank, on every rank."""
        if self.world == 1:
            return [value]
        values: list[T] = [value] * self.world
        dist.all_gather_object(values, value, group=self.group)
        return values

    def collect(self, value: T) -> list[T]:
        """Gather a picklable value of every rank. Returns the values by rank on rank 0, an empty list on the others."""
        if self.world == 1:
            return [value]
        values: list[T] | None = [value] * self.world if self.logs else None
        dist.gather_object(value, values, dst=0, group=self.group)
        return values or []

    def scatter(self, values: list[T]) -> T:
        """This rank's item of the list `values` of rank 0, which has one item for each rank."""
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
        """The same ranks with a separate gloo group, for another thread; all ranks call this together.

        Collectives of two threads must not mix in one group. The group has no time limit, because the watchdog limits
        how long the training waits for the thread.
        """
        if self.world == 1:
            return self
        group = dist.new_group(backend="gloo", timeout=_NO_LIMIT, group_desc=BESIDE)
        return replace(self, group=group)


BESIDE = "beside"
"""Description of the group of `World.beside`: its collectives do not belong to a step."""
_JOIN_SECONDS = 600.0
_NO_LIMIT = datetime.timedelta(days=30)
# Longest pauses between two looks of a rank that waits for others: in a job of up to 100 ranks, and in a larger job.
_USUAL_PAUSE_SECONDS, _MOST_PAUSE_SECONDS = 1.0, 6.0
_LOOKS_A_SECOND = 100
# After this time a waiting rank tells the user which ranks have not come, and again when that changes.
_TOLD_SECONDS = 5.0
_ALL_HERE = "titanlab/all ranks are here"


class AbsentRanks(TitanlabError, TimeoutError):
    """Ranks that did not come to the rendezvous in time."""


@contextlib.contextmanager
def open_world(
    ranks: Ranks,
    *,
    accelerator: str,
    seed: int,
    deterministic: bool,
    waits: Callable[[str], None] = lambda text: None,
) -> Iterator[World]:
    """Join the process group, select the device, seed every generator; leave the group at the end.

    Args:
        waits: called with a text that names the absent ranks, when they keep this rank waiting.

    Raises:
        AbsentRanks: other ranks did not come in time.
    """
    device = _select_device(accelerator, ranks)
    random.seed(seed)
    # NumPy's global generator is for third-party code; titanlab itself does not draw from it.
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    _join(ranks, device, waits)
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
        # CUDA numbers the visible devices of a process from 0.
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


def _join(ranks: Ranks, device: torch.device, waits: Callable[[str], None]) -> None:
    if is_one_host(ranks) and (interface := loopback_interface()) is not None:
        # gloo need not be reachable from other hosts. If the user has set the variable, it stays.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if ranks.world == 1:
        # Use no address and no port, so that several runs can share a host.
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "nccl", store=dist.HashStore(), rank=0, world_size=1
        )
        return
    wait = _Wait(ranks, waits)
    try:
        store = _store(ranks, wait)
        if not _is_agents_store():
            # Wait until all ranks have come. torchrun does not need this: its agents meet before they start ranks.
            wait.absent = lambda: named(rank for rank in range(ranks.world) if not store.check([_sign(rank)]))
            store.set(_sign(ranks.rank), "")
            if store.add("titanlab/ranks", 1) == ranks.world:
                store.set(_ALL_HERE, "")
            while not store.check([_ALL_HERE]):
                wait.pause()
    except StoppedEarly:
        raise StoppedEarly(f"while it waited for {wait.absent()}") from None
    dist.init_process_group(
        # Python objects and CPU tensors need gloo, even if CUDA tensors use NCCL.
        "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
        store=store,
        rank=ranks.rank,
        world_size=ranks.world,
        timeout=datetime.timedelta(seconds=_JOIN_SECONDS),
        device_id=device if device.type == "cuda" else None,
    )


class _Wait:
    """The wait for other ranks, in Python: torch's own waits are native code, in which no stop signal is handled.

    Attributes:
        absent: returns the names of the ranks that have not come.
    """

    def __init__(self, ranks: Ranks, waits: Callable[[str], None]) -> None:
        self._ranks, self._waits = ranks, waits
        self._begin = time.monotonic()
        self._tell_at, self._told = _TOLD_SECONDS, ""
        self.absent: Callable[[], str] = lambda: "torchrun's agent" if _is_agents_store() else "rank 0"

    def pause(self) -> None:
        """Wait before the next look, longer each time, and tell the user which ranks keep this rank waiting."""
        waited = time.monotonic() - self._begin
        if waited >= _JOIN_SECONDS:
            where = f"the rendezvous of {self._ranks.world} ranks at {self._ranks.address}:{self._ranks.port}"
            raise AbsentRanks(f"{self.absent()} did not come to {where} within {_JOIN_SECONDS:g} s")
        if waited >= self._tell_at:
            self._tell_at += _TOLD_SECONDS
            text = f"rendezvous of {self._ranks.world} ranks, waiting for {self.absent()}"
            if text != self._told:
                self._told = text
                self._waits(text)
        # The ranks of a large job look less often: all of them together a hundred times a second.
        least = min(_MOST_PAUSE_SECONDS, self._ranks.world / _LOOKS_A_SECOND)
        time.sleep(max(least, min(_USUAL_PAUSE_SECONDS, waited / 10)))


def _store(ranks: Ranks, wait: _Wait) -> dist.TCPStore:
    """The store through which the ranks exchange their addresses: that of rank 0 or of torchrun's agent.

    torch's store listens on all addresses of the host; anyone who reaches it can read and change what ranks exchange.
    If all ranks are on this host, the store listens only on the loopback.
    """
    is_own = is_one_host(ranks) and not _is_agents_store()
    is_master = ranks.rank == 0 and not _is_agents_store()
    address = LOOPBACK if is_own else ranks.address
    # `detach` gives the descriptor to the store, which closes it.
    listener = listen(address, ranks.port).detach() if is_master and is_own else None
    while not is_master:
        with (
            contextlib.suppress(OSError),
            socket.create_connection((address, ranks.port), timeout=_USUAL_PAUSE_SECONDS),
        ):
            break
        wait.pause()
    return dist.TCPStore(
        address,
        ranks.port,
        world_size=ranks.world,
        is_master=is_master,
        timeout=datetime.timedelta(seconds=_JOIN_SECONDS),
        wait_for_workers=False,
        master_listen_fd=listener,
    )


def _is_agents_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _sign(rank: int) -> str:
    return f"titanlab/rank {rank} is here"
