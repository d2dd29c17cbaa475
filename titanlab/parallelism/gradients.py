"""The gradients of all parameters as one vector spread over all ranks: its norm, and its scaling."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate


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
                shares.append(torch.nn.utils.get_total_norm(gradients).double().square() / copies)
        return torch.stack(shares).sum()

    def scale(self, factor: torch.Tensor) -> None:
        """Multiply every gradient by a scalar tensor."""
        for parameters in self._by_copies.values():
            gradients = _local(parameters)
            if gradients:
                torch._foreach_mul_(gradients, factor.to(gradients[0]))


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
