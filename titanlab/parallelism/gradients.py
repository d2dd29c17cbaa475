"""The gradients of all parameters as one vector spread over all ranks: its norm, and its scaling."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

_ADDED_AT_ONCE = 1 << 14


class Gradients:
    """Norm and scaling of gradients whose parameters are whole, sharded, or both.

    A gradient that `copies` ranks hold alike enters the sum over ranks with weight 1/copies, so that
    one reduction over the world gives the norm whatever the layout.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], world: int) -> None:
        self._by_copies: dict[int, list[nn.Parameter]] = {}
        for parameter in parameters:
            self._by_copies.setdefault(world // _parts(parameter), []).append(parameter)

    def squared_norm(self) -> torch.Tensor:
        """This rank's share of the squared norm (float64 scalar); the shares sum to the whole."""
        shares = []
        for copies, parameters in self._by_copies.items():
            gradients = _local(parameters)
            if gradients:
                shares.append(_squared_norm(gradients) / copies)
        return torch.stack(shares).sum()

    def scale(self, factor: torch.Tensor) -> None:
        """Multiply every gradient by a scalar tensor."""
        for parameters in self._by_copies.values():
            gradients = _local(parameters)
            if gradients:
                torch._foreach_mul_(gradients, factor.to(gradients[0]))


def _squared_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Sum of squares of all elements: float64 scalar on their device."""
    if gradients[0].device.type == "cpu":
        # There float32 squares are added one after another: the norm of 2^26 elements would be off by 0.5 %,
        # and by another share in another layout. So row by row first; small tensors need no rows.
        gradients = [g if g.numel() <= _ADDED_AT_ONCE else torch.linalg.vector_norm(g, dim=-1) for g in gradients]
        return torch.stack(torch._foreach_norm(gradients)).double().square().sum()
    return torch.nn.utils.get_total_norm(gradients).double().square()


def _parts(parameter: nn.Parameter) -> int:
    """Number of ranks over which one copy of the parameter is spread."""
    data = parameter.data
    if not isinstance(data, DTensor):
        return 1
    parts = 1
    for axis, placement in enumerate(data.placements):
        if not isinstance(placement, Replicate):
            parts *= data.device_mesh.size(axis)
    return parts


def _local(parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
