"""One rank of a world whose other ranks do not exist: a process group that sends nothing, and tensors without data."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed import fake_pg

from titanlab.distributed.world import World
from titanlab.parallelism.collectives import STANDS_FOR_NCCL


@contextlib.contextmanager
def fake_world(rank: int, ranks: int, *, nccl: bool) -> Iterator[tuple[World, FakeTensorMode]]:
    """A rank on CPU, and the mode in which its tensors have shapes but no data.

    Modules are built and sharded outside the mode, because torch reads values of small tensors there; parameters get
    their storage in it.

    Args:
        nccl: its group stands for NCCL, which has a reduce-scatter; otherwise for gloo.
    """
    if nccl and not hasattr(dist.Backend, STANDS_FOR_NCCL.upper()):
        dist.Backend.register_backend(STANDS_FOR_NCCL, fake_pg._create_fake_pg, extended_api=True, devices=["cpu"])
    # Small tensors that were made outside the mode take part in operations.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    backend = STANDS_FOR_NCCL if nccl else "fake"
    dist.init_process_group(backend, store=fake_pg.FakeStore(), rank=rank, world_size=ranks)
    try:
        yield World(rank=rank, world=ranks, local_rank=0, device=torch.device("cpu"), without_data=mode), mode
    finally:
        dist.destroy_process_group()
        # DTensor remembers meshes, whose groups have gone.
        _clear_sharding_prop_cache()
