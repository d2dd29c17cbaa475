"""Norm and scaling of the gradients of all parameters, as one vector distributed over all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from titanlab.dtensor import local_part

_ADDED_AT_ONCE = 1 << 14


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
        # On CPU torch adds float32 squares one after another: the norm of 2^26 elements would be wrong by 0.5 %, and by
        # another share in another layout. So large tensors are first reduced row by row.
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
