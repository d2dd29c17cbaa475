"""The product of a linear layer, with a backward pass in two halves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# The attribute of a converted layer that has its Product. A layer without it multiplies as its class does.
ATTRIBUTE = "product"
# The attribute of a layer that is computed with others as one product: a text that they share.
JOINED = "joined_as"

# (layer, inputs [..., in], bias or None) → [..., out]. Tensor parallelism has cut `layer.weight`.
TensorProduct: TypeAlias = Callable[[nn.Module, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class Product:
    """A product whose two gradients can be computed separately. Weights are plain tensors: this rank's part.

    Attributes:
        forward: (inputs [..., in], weight [out, in], bias or None) → [..., out]; differentiable by autograd.
        of_inputs: (gradient [..., out], weight) → gradient of the inputs.
        of_weight: (gradient [..., out], inputs [..., in]) → gradient of the weight.
        for_forward, for_inputs: weight → what `forward` or `of_inputs` makes of it at each call, and takes in its
            place: a caller that multiplies the weight several times casts it once.
        join: (weights [out, in] of several layers) → one weight with the rows of all.
    """

    forward: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    of_inputs: Callable[[Tensor, Tensor], Tensor]
    of_weight: Callable[[Tensor, Tensor], Tensor]
    for_forward: Callable[[Tensor], Tensor] = lambda weight: weight
    for_inputs: Callable[[Tensor], Tensor] = lambda weight: weight
    join: Callable[[Sequence[Tensor]], Tensor] = lambda weights: torch.cat(list(weights))


def product_of(layer: nn.Module) -> Product:
    """The product of a layer."""
    product: Product = getattr(layer, ATTRIBUTE, PLAIN)
    return product


def rows(tensor: Tensor) -> Tensor:
    """[..., n] → [rows, n]."""
    return tensor.flatten(0, -2)


PLAIN = Product(
    forward=lambda inputs, weight, bias: F.linear(inputs, weight, bias),
    of_inputs=lambda gradient, weight: gradient @ weight,
    of_weight=lambda gradient, inputs: rows(gradient).t() @ rows(inputs),
)
