"""Data parallelism: FSDP2, HSDP, DDP, or one process, behind one answer to 'how do gradients meet?'."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titanlab.parallelism.schema import Parallelism
from titanlab.precision.dtypes import Dtypes


class Microbatch(Protocol):
    """Opens the context of one microbatch."""

    def __call__(self, *, last: bool) -> AbstractContextManager[None]:
        """`last`: the step's last one, after which gradients are reduced."""
        ...


@dataclass(frozen=True, kw_only=True)
class Sharded:
    """A model that is spread over data-parallel ranks.

    Attributes:
        forward: what to call: the model, or DDP's wrapper of it.
        microbatch: context of one microbatch's forward and backward.
        release: lets go of what a forward has gathered that no backward follows.
        divides_by: what the reduction divides the sum of all ranks' gradients by.
    """

    forward: Callable[..., torch.Tensor]
    microbatch: Microbatch
    release: Callable[[], None]
    divides_by: int


def fully_shard_model(
    model: nn.Module, blocks: list[nn.Module], mesh: DeviceMesh, config: Parallelism, dtypes: Dtypes
) -> Sharded:
    """FSDP2: each block a unit, and the rest of the model another. A 2-D mesh makes it HSDP.

    Args:
        mesh: `[shard]` or `[replicate, shard]`.
    """
    # Imported here: 0.3 s that a single process in fp32 does not need.
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    policy = MixedPrecisionPolicy(
        param_dtype=dtypes.compute if dtypes.mixed else None,
        reduce_dtype=dtypes.reduce if dtypes.mixed else None,
    )
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if config.cpu_offload else OffloadPolicy()
    reshard = config.reshard_after_forward == "always"
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=reshard)
    # The root's own parameters are needed again as soon as the backward starts.
    fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=False)
    root = model
    assert isinstance(root, FSDPModule)

    @contextlib.contextmanager
    def microbatch(*, last: bool) -> Iterator[None]:
        root.set_is_last_backward(last)
        root.set_requires_gradient_sync(last)
        yield

    def release() -> None:
        for module in (root, *blocks):
            assert isinstance(module, FSDPModule)
            module.reshard()

    return Sharded(forward=model, microbatch=microbatch, release=release, divides_by=mesh.size())


def replicate_model(model: nn.Module, mesh: DeviceMesh) -> Sharded:
    """DDP over a 1-D mesh: every rank holds everything.

    The wrapper is only called; the model keeps its names, so that checkpoints do not know of it.
    """
    from torch.nn.parallel import DistributedDataParallel

    wrapper = DistributedDataParallel(model, process_group=mesh.get_group(), gradient_as_bucket_view=True)
    # Buffers are the same everywhere. Set here because torch 2.13 warns of the argument, and 2.11 has no other.
    wrapper.broadcast_buffers = False

    def microbatch(*, last: bool) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if last else wrapper.no_sync()

    return Sharded(forward=wrapper, microbatch=microbatch, release=lambda: None, divides_by=mesh.size())


def keep_whole(model: nn.Module) -> Sharded:
    """One process: nothing to reduce."""
    return Sharded(
        forward=model, microbatch=lambda *, last: contextlib.nullcontext(), release=lambda: None, divides_by=1
    )
