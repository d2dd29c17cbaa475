"""Data parallelism: FSDP2, HSDP, DDP, or one process, behind one interface."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from titanlab.parallelism.collectives import reduce_scatter
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
        release: frees what a forward has gathered that no backward follows.
        divides_by: what the reduction divides the sum of all ranks' gradients by.
    """

    forward: Callable[..., torch.Tensor]
    microbatch: Microbatch
    release: Callable[[], None]
    divides_by: int


def fully_shard_model(
    model: nn.Module,
    blocks: list[nn.Module],
    mesh: DeviceMesh,
    dtypes: Dtypes,
    *,
    reshard_after_forward: bool,
    cpu_offload: bool,
    whole: Sequence[nn.Module] = (),
    apart: Sequence[nn.Module] = (),
) -> Sharded:
    """FSDP2: each block a unit, and the rest of the model another. A 2-D mesh makes it HSDP.

    Args:
        mesh: `[shard]` or `[replicate, shard]`.
        reshard_after_forward: blocks free what they have gathered, until the backward; but not the last one, nor the
            rest of the model, which are needed again as soon as that starts.
        whole: units that compute and reduce in float32, beside others that do not; the model stands for its rest.
        apart: modules outside of blocks that are units of their own, since they are not of the rest's dtype.
    """
    # Imported here: 0.3 s that a single process in fp32 does not need.
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    def policy(unit: nn.Module) -> MixedPrecisionPolicy:
        in_fp32 = unit in whole
        return MixedPrecisionPolicy(
            param_dtype=torch.float32 if in_fp32 else dtypes.compute if dtypes.mixed else None,
            reduce_dtype=torch.float32 if in_fp32 else dtypes.reduce if dtypes.mixed else None,
            # Inputs have the right type already, or are not to be rounded: positions do not survive that.
            cast_forward_inputs=False,
        )

    offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if cpu_offload else OffloadPolicy()
    shard = functools.partial(
        fully_shard,
        mesh=mesh,
        offload_policy=offload,
        shard_placement_fn=functools.partial(_sharded_dim, parts=mesh.size(mesh.ndim - 1)),
    )
    for module in (*blocks, *apart, model):
        module.register_forward_hook(_without_views)
    for unit in (*blocks, *apart, model):
        frees = reshard_after_forward and unit in blocks[:-1]
        shard(unit, mp_policy=policy(unit), reshard_after_forward=frees)
    root = model
    assert isinstance(root, FSDPModule)

    units = [module for module in (*blocks, *apart, root) if isinstance(module, FSDPModule)]
    kept = [unit for unit in units if not (reshard_after_forward and unit in blocks[:-1])]
    if mesh.device_type == "cpu":
        for unit in units:
            # The protocol's class has no public name.
            unit.set_custom_reduce_scatter(cast(Any, _ReduceScatter()))

    @contextlib.contextmanager
    def microbatch(*, last: bool) -> Iterator[None]:
        root.set_is_last_backward(last)
        root.set_requires_gradient_sync(last)
        # The next microbatch need not gather what a backward leaves whole.
        for unit in kept:
            unit.set_reshard_after_backward(last, recurse=False)
        yield

    def release() -> None:
        for unit in units:
            unit.reshard()

    return Sharded(forward=model, microbatch=microbatch, release=release, divides_by=mesh.size())


class _NoView(torch.autograd.Function):
    """The same numbers as a tensor that is no view."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def _without_views(module: nn.Module, inputs: object, output: Any) -> Any:
    """Return no view from a unit of FSDP2, which warns of views; a linear layer with a bias makes one."""
    if isinstance(output, torch.Tensor) and output.requires_grad and output._base is not None:
        return _NoView.apply(output)  # type: ignore[no-untyped-call]
    return output


class _ReduceScatter:
    """The reduce-scatter of gradients for FSDP2 on CPUs, where gloo's own reduces everything on every rank."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,  # noqa: FBT001, FBT002 (torch's)
    ) -> None:
        assert op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG), op
        reduce_scatter(output_tensor, input_tensor, group)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())


def _sharded_dim(parameter: nn.Parameter, *, parts: int) -> Shard | None:
    """The dim to shard: the first, or the second where tensor parallelism has cut the first into odd parts."""
    if not isinstance(parameter, DTensor) or Shard(0) not in parameter.placements:
        return None
    rows = parameter.device_mesh.size() * parts
    return Shard(1) if parameter.shape[0] % rows else None


class _Rehearsed(nn.Module):
    """A model that, without inputs, returns zero, whose backward visits its parameters from last to first."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Any) -> torch.Tensor:
        if inputs:
            output: torch.Tensor = self.model(*inputs)
            return output
        total = sum(parameter.float().sum() * 0.0 for parameter in self.parameters() if parameter.requires_grad)
        assert isinstance(total, torch.Tensor)
        return total


def replicate_model(model: nn.Module, mesh: DeviceMesh) -> Sharded:
    """DDP over a 1-D mesh: every rank holds everything.

    Only the wrapper is called; the model keeps its names, so that checkpoints are the same without it.
    """
    from torch.nn.parallel import DistributedDataParallel

    wrapper = DistributedDataParallel(_Rehearsed(model), process_group=mesh.get_group(), gradient_as_bucket_view=True)
    # Buffers are the same everywhere. Set here because torch 2.13 warns of the argument, and 2.11 has no other.
    wrapper.broadcast_buffers = False
    # The first backward teaches DDP an order, in which the next forward fills its buckets anew; and where an element
    # lies in a bucket decides in what order three or more ranks are summed. Without a rehearsal the first step after a
    # resume would round otherwise than the same step of an undisturbed run.
    for _ in range(2):
        wrapper().backward()
    for parameter in model.parameters():
        parameter.grad = None

    def microbatch(*, last: bool) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if last else wrapper.no_sync()

    return Sharded(forward=wrapper, microbatch=microbatch, release=lambda: None, divides_by=mesh.size())


def keep_whole(model: nn.Module) -> Sharded:
    """One process: nothing to reduce."""
    return Sharded(
        forward=model, microbatch=lambda *, last: contextlib.nullcontext(), release=lambda: None, divides_by=1
    )
