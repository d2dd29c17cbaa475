"""Data parallelism: FSDP2, HSDP, DDP, or one process, behind one interface; norm and scaling of the gradients."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from titanlab.costs import fsdp_dim
from titanlab.dtensor import local_part
from titanlab.errors import ConfigError
from titanlab.parallelism.collectives import reduce_scatter
from titanlab.techniques.precision.cast import dtype_named
from titanlab.techniques.precision.contract import Formats

_SYMMETRIC = "parallelism.symmetric_memory"
# On CPU, squares of a tensor with more elements than this are first added row by row.
_ADDED_AT_ONCE = 1 << 14


@dataclass(frozen=True, kw_only=True)
class Sharded:
    """A model that is distributed over data-parallel ranks.

    Attributes:
        forward: the function to call: the model, or DDP's wrapper.
        microbatch: context manager of one microbatch's forward and backward; `last=`: whether the microbatch is the
            last one of the step.
        release: frees parameters gathered by a forward without a backward.
        divides_by: the number by which the reduction divides the sum of all ranks' gradients.
    """

    forward: Callable[..., torch.Tensor]
    microbatch: Callable[..., AbstractContextManager[None]]
    release: Callable[[], None]
    divides_by: int


@dataclass(frozen=True, kw_only=True)
class ExpertModules:
    """The modules that have the experts' parameters, and the mesh over which FSDP2 shards these.

    Attributes:
        modules: one in each block.
        mesh: `[shard]` or `[replicate, shard]`, with fewer shards than for the dense parameters.
    """

    modules: Sequence[nn.Module]
    mesh: DeviceMesh


def fully_shard_model(
    model: nn.Module,
    blocks: list[nn.Module],
    mesh: DeviceMesh,
    formats: Formats,
    *,
    freed: int,
    prefetch: int = 0,
    cpu_offload: bool,
    whole: Sequence[nn.Module] = (),
    apart: Sequence[nn.Module] = (),
    experts: ExpertModules | None = None,
    symmetric_memory: bool = False,
    reduces_each: bool = False,
) -> Sharded:
    """Apply FSDP2: each block is a unit, and the rest of the model is another unit; a 2-D mesh makes it HSDP.

    Args:
        mesh: `[shard]` or `[replicate, shard]`.
        freed: number of first blocks that free their gathered parameters until the backward; the other blocks and the
            rest of the model, which the backward needs first, keep them.
        prefetch: number of blocks that are gathered ahead of the block that computes; 0: FSDP2's own order.
        whole: units that compute and reduce in float32 while others do not; `model` in this list means the rest of the
            model.
        apart: modules outside blocks that are separate units, because their dtype is not that of the rest.
        experts: modules inside blocks that are separate units over another mesh; None: there are none.
        reduces_each: gradients are reduced after each microbatch, and their shards are summed; otherwise whole
            gradients are summed, and reduced after the last one. Reduction over replicas always follows the last one.
    """
    # Imported here: the import takes 0.3 s, and a single process in fp32 does not need it.
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    def policy(unit: nn.Module) -> MixedPrecisionPolicy:
        compute, reduce = ("float32", "float32") if unit in whole else (formats.compute, formats.reduce)
        casts = unit in whole or formats.mixed
        return MixedPrecisionPolicy(
            param_dtype=dtype_named(compute) if casts else None,
            reduce_dtype=dtype_named(reduce) if casts else None,
            # Inputs have the right dtype already, or must not be rounded, like positions.
            cast_forward_inputs=False,
        )

    offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if cpu_offload else OffloadPolicy()
    inner = {
        block: [unit for unit in block.modules() if experts is not None and unit in experts.modules] for block in blocks
    }

    def shard(unit: nn.Module, *, like: nn.Module, over: DeviceMesh) -> None:
        fully_shard(
            unit,
            mesh=over,
            offload_policy=offload,
            shard_placement_fn=functools.partial(_sharded_dim, parts=over.size(over.ndim - 1)),
            mp_policy=policy(like),
            reshard_after_forward=like in blocks[:freed],
        )

    for module in (*blocks, *apart, model):
        module.register_forward_hook(_without_views)
    for block, within in inner.items():
        for unit in within:
            assert experts is not None
            shard(unit, like=block, over=experts.mesh)
            _gather_with(block, unit)
    for unit in (*blocks, *apart, model):
        shard(unit, like=unit, over=mesh)
    # `Any`, because torch turns these modules into `FSDPModule` in place.
    root: Any = model
    units: list[Any] = [*itertools.chain(*inner.values()), *blocks, *apart, model]
    # Gather the units of the next block with experts while a block computes. By default FSDP2 gathers one unit ahead,
    # and in the forward only when the host gets there: too late, because the host waits for the router's counts.
    ahead: list[list[Any]] = [[block, *within] for block, within in inner.items() if within or prefetch]
    for place, own in enumerate(ahead):
        if after := ahead[place + 1 : place + 1 + max(1, prefetch)]:
            own[-1].set_modules_to_forward_prefetch(list(itertools.chain(*after)))
        if before := ahead[max(0, place - max(1, prefetch)) : place]:
            # Reversed, because the backward reaches the last unit first.
            own[0].set_modules_to_backward_prefetch(list(itertools.chain(*before))[::-1])
    if prefetch:
        root.set_modules_to_forward_prefetch(list(itertools.chain(*ahead[:prefetch])))
        root.set_modules_to_backward_prefetch(list(itertools.chain(*ahead[-prefetch:]))[::-1])
    first = [unit for block in blocks[:freed] for unit in (block, *inner[block])]
    kept = [unit for unit in units if unit not in first]
    if symmetric_memory:
        meshes = (mesh,) if experts is None else (mesh, experts.mesh)
        use_symmetric_memory(units, [device_mesh.get_group(device_mesh.ndim - 1) for device_mesh in meshes])
    elif mesh.device_type == "cpu":
        for unit in units:
            unit.set_custom_reduce_scatter(_ReduceScatter())

    @contextlib.contextmanager
    def microbatch(*, last: bool) -> Iterator[None]:
        root.set_is_last_backward(last)
        root.set_requires_gradient_sync(last or reduces_each)
        root.set_requires_all_reduce(last)
        # Units in `kept` stay gathered after a backward, so that the next microbatch need not gather them.
        for unit in kept:
            unit.set_reshard_after_backward(last, recurse=False)
        yield

    def release() -> None:
        for unit in units:
            unit.reshard()

    return Sharded(forward=model, microbatch=microbatch, release=release, divides_by=mesh.size())


def symmetric_memory_setter() -> Callable[[Any], None]:
    """The method of FSDP2 that lets a unit use symmetric memory; ConfigError if the installed torch lacks it."""
    from torch.distributed.fsdp import FSDPModule

    setter: Callable[[Any], None] | None = getattr(FSDPModule, "set_symm_mem_for_comm", None)
    if setter is None:
        rule = "needs FSDPModule.set_symm_mem_for_comm, which this torch does not have"
        raise ConfigError(_SYMMETRIC, True, rule, "try false, or a newer torch")
    return setter


def use_symmetric_memory(units: Sequence[Any], groups: Sequence[dist.ProcessGroup]) -> None:
    """Let every unit of FSDP2 gather into, and scatter from, buffers that NCCL registers with all ranks."""
    setter = symmetric_memory_setter()
    others = {str(dist.get_backend(group)) for group in groups} - {dist.Backend.NCCL}
    if others:
        rule = f"is memory of NCCL, and a group of FSDP2 uses {', '.join(sorted(others))}"
        raise ConfigError(_SYMMETRIC, True, rule, "try false")
    for unit in units:
        # Must come before `setter`: NCCL's reduce-scatter in symmetric memory only sums, so FSDP2 divides afterwards.
        unit.set_force_sum_reduction_for_comms(True)
        setter(unit)


def _gather_with(block: nn.Module, unit: nn.Module) -> None:
    """Let a unit of FSDP2 inside a block gather before the block's forward starts, and free after that forward ends.

    A compiler traces the block's forward as one graph, and checkpointing recomputes it as one function; neither may
    contain FSDP2's collectives. Call this before the block itself becomes a unit.
    """
    state: Any = unit._get_fsdp_state()  # type: ignore[operator]
    # Private in torch 2.11 to 2.13. No public function lets modules of two meshes gather at the same time.
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    state._pre_forward_hook_handle = block.register_forward_pre_hook(state._pre_forward, prepend=True, with_kwargs=True)
    state._post_forward_hook_handle = block.register_forward_hook(state._post_forward)


class _NoView(torch.autograd.Function):
    """Identity whose result is not a view."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def _without_views(module: nn.Module, inputs: object, output: Any) -> Any:
    """The output of a unit, not as a view: FSDP2 warns about views, which a linear layer with a bias returns."""
    if isinstance(output, torch.Tensor) and output.requires_grad and output._base is not None:
        return _NoView.apply(output)  # type: ignore[no-untyped-call]
    return output


class _ReduceScatter:
    """The reduce-scatter of gradients for FSDP2 on CPU: gloo's own reduce-scatter reduces everything on every rank."""

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
    """The dim that FSDP2 shards, as a placement; None: the first dim."""
    cut, tensor = None, 1
    if isinstance(parameter, DTensor):
        cut = next((placement.dim for placement in parameter.placements if isinstance(placement, Shard)), None)
        tensor = parameter.device_mesh.size()
    dim = fsdp_dim(parameter.shape, cut, tensor=tensor, fsdp=parts)
    return Shard(dim) if dim else None


class _DryRun(nn.Module):
    """Wraps the model; without inputs its output is zero, whose backward visits the parameters from last to first."""

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


def replicate_model(model: nn.Module, mesh: DeviceMesh, *, reduces_each: bool = False) -> Sharded:
    """Apply DDP over a 1-D mesh; the model keeps its parameter names, so checkpoints are the same as without DDP.

    Args:
        reduces_each: as in `fully_shard_model`; DDP keeps whole gradients either way, so this only sends more.
    """
    from torch.nn.parallel import DistributedDataParallel

    wrapper = DistributedDataParallel(_DryRun(model), process_group=mesh.get_group(), gradient_as_bucket_view=True)
    # Do not broadcast buffers: they are the same on all ranks. Set the attribute, because torch 2.13 deprecates the
    # argument, and 2.11 lacks its replacement.
    wrapper.broadcast_buffers = False
    # DDP learns an order in the first backward and rebuilds its buckets in the next forward. An element's place in its
    # bucket decides the order in which three or more ranks are summed. Without these two empty steps the first step
    # after a resume would round differently from the same step of an uninterrupted run.
    for _ in range(2):
        wrapper().backward()
    for parameter in model.parameters():
        parameter.grad = None

    def microbatch(*, last: bool) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if last or reduces_each else wrapper.no_sync()

    return Sharded(forward=wrapper, microbatch=microbatch, release=lambda: None, divides_by=mesh.size())


def keep_whole(model: nn.Module) -> Sharded:
    return Sharded(
        forward=model, microbatch=lambda *, last: contextlib.nullcontext(), release=lambda: None, divides_by=1
    )


class Gradients:
    """Norm and scaling of gradients; some of the parameters may be sharded.

    If `copies` ranks have the same part of a gradient, it enters the sum over ranks with weight 1/copies, so that
    one reduction over the world gives the norm in every layout.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], holders: int) -> None:
        """`holders`: number of ranks that have a part or all of each parameter: the ranks of one pipeline stage."""
        self._by_copies: dict[int, list[nn.Parameter]] = {}
        for parameter in parameters:
            self._by_copies.setdefault(holders // _parts(parameter), []).append(parameter)

    def squared_norm(self) -> torch.Tensor:
        """This rank's share of the squared norm, float64 scalar; the sum of the shares is the squared norm."""
        shares = []
        for copies, parameters in self._by_copies.items():
            gradients = _local_gradients(parameters)
            if gradients:
                shares.append(_squared_norm(gradients) / copies)
        return torch.stack(shares).sum()

    def scale(self, factor: torch.Tensor) -> None:
        for parameters in self._by_copies.values():
            gradients = _local_gradients(parameters)
            if gradients:
                # Gradients in 16 bits are multiplied by a float32 factor.
                torch._foreach_mul_(gradients, factor.to(gradients[0].device, torch.float32))


def sum_gradients(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    """Sum the gradients of some parameters over a group in place, in one reduction in the given dtype."""
    gradients = _local_gradients(parameters)
    if gradients:
        flat = torch.cat([gradient.flatten() for gradient in gradients]).to(dtype)
        dist.all_reduce(flat, group=group)
        torch._foreach_copy_([g.flatten() for g in gradients], flat.split([g.numel() for g in gradients]))


@torch.no_grad()
def scale_gradients(parameters: Sequence[nn.Parameter], factor: float) -> None:
    gradients = _local_gradients(parameters)
    if gradients:
        torch._foreach_mul_(gradients, factor)


def _squared_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Sum of squares of all elements: float64 scalar on their device."""
    # The norm of 16-bit gradients is computed in 32 bits.
    dtype = torch.promote_types(gradients[0].dtype, torch.float32)
    if gradients[0].device.type == "cpu":
        # On CPU torch adds float32 squares one after another: the norm of 2^26 elements would be wrong by 0.5 %, and in
        # another layout by another percentage. So large tensors are first reduced row by row.
        gradients = [
            g if g.numel() <= _ADDED_AT_ONCE else torch.linalg.vector_norm(g, dim=-1, dtype=dtype) for g in gradients
        ]
    norms = torch.stack(torch._foreach_norm(gradients, 2, dtype=dtype))
    return norms.double().square().sum()


def _parts(parameter: nn.Parameter) -> int:
    """Number of ranks over which one copy of the parameter is sharded."""
    data = parameter.data
    if not isinstance(data, DTensor):
        return 1
    axes = enumerate(data.placements)
    return math.prod(data.device_mesh.size(axis) for axis, placement in axes if not placement.is_replicate())


def _local_gradients(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    return [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
