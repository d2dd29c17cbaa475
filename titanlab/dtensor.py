"""One rank's part of a tensor that is distributed over ranks."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor


def local_part(tensor: Any) -> Any:
    """This rank's part of a DTensor as a plain tensor, differentiable; any other value unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def distributed_like(tensor: Any, local: Any) -> Any:
    """A DTensor with `local` as this rank's part, distributed like `tensor`; if `tensor` is plain, `local` itself."""
    if not isinstance(tensor, DTensor):
        return local
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def in_gradient_dtype(parameter: Any, gradient: Any) -> Any:
    """The gradient in the dtype that the parameter's `grad` must have (`Tensor.grad_dtype`).

    Under FSDP2, this is the reduce dtype in torch 2.15, and the parameter's dtype in earlier versions.
    """
    return gradient if parameter.grad_dtype is None else gradient.to(parameter.grad_dtype)


def own_box(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]] | None:
    """This rank's part of a tensor, and its offsets in the full tensor; None: the rank is outside of the tensor's mesh.

    Raises:
        ValueError: the tensor is a partial sum.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach(), (0,) * tensor.dim()
    if tensor.device_mesh.get_coordinate() is None:
        return None
    (chunk,) = tensor.__create_chunk_list__()
    local = tensor.to_local().detach()
    if tuple(chunk.sizes) != tuple(local.shape) and local.numel():
        raise ValueError(f"a shard of shape {tuple(local.shape)} where {tuple(chunk.sizes)} was expected")
    return local, tuple(chunk.offsets)
