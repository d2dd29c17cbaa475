"""Linear layers with the same input."""

from __future__ import annotations

from torch import Tensor, nn


class Projections(nn.Module):
    """Calls linear layers with one input: inputs [..., in] and layers → a tuple of their outputs [..., out].

    It is a separate module so that the trainer can compute one product instead; see `titanlab.parallelism.joined`.
    """

    def forward(self, inputs: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
        return tuple(layer(inputs) for layer in layers)
