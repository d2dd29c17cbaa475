"""How a linear layer multiplies, with its backward in two halves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

# Of a layer that a precision has exchanged: its Product. Without it, a layer multiplies as its class does.
ATTRIBUTE = "product"


@dataclass(frozen=True)
class Product:
    """A product whose two gradients can be computed apart. Weights are what a rank has of them, plain.

    Attributes:
        forward: (inputs [..., in], weight [out, in], bias or None) → [..., out]; autograd knows its backward.
        of_inputs: (gradient [..., out], weight) → gradient of the inputs.
        of_weight: (gradient [..., out], inputs [..., in]) → gradient of the weight.
    """

    forward: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    of_inputs: Callable[[Tensor, Tensor], Tensor]
    of_weight: Callable[[Tensor, Tensor], Tensor]


def product_of(layer: nn.Module) -> Product:
    """How a layer multiplies."""
    found: Product = getattr(layer, ATTRIBUTE, PLAIN)
    return found


def rows(tensor: Tensor) -> Tensor:
    """[..., n] → [rows, n]."""
    return tensor.flatten(0, -2)


PLAIN = Product(
    forward=lambda inputs, weight, bias: F.linear(inputs, weight, bias),
    of_inputs=lambda gradient, weight: gradient @ weight,
    of_weight=lambda gradient, inputs: rows(gradient).t() @ rows(inputs),
)
