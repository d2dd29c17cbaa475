"""The products of linear layers, and the check whether other code may compute a module in place of its `forward`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

from titanlab.errors import ConfigError

# The attribute that holds a layer's Product. A layer whose `forward` is not nn.Linear's must set it.
ATTRIBUTE = "product"
# The attribute of layers that are computed as one product; its value, a text, is the same in these layers.
JOINED = "joined_as"

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def _at_once(*_: Tensor) -> Tensor:
    raise NotImplementedError("autograd computes both gradients of this product at once")


@dataclass(frozen=True)
class Product:
    """How a linear layer multiplies, forward and backward. Weights are plain tensors: this rank's part.

    Attributes:
        forward: (inputs [..., in], weight [out, in], bias or None) → [..., out]; differentiable by autograd.
        of_inputs: (gradient [..., out], weight) → gradient of the inputs.
        of_weight: (gradient [..., out], inputs [..., in]) → gradient of the weight. Without it or `of_inputs`, the two
            gradients cannot be computed separately: pipelines do not defer the weight's gradient, and fused projections
            and a loss in chunks are refused.
        for_forward, for_inputs: cast a weight for `forward` or `of_inputs`, which accept the result in place of the
            weight. So a caller that multiplies by the weight several times casts it once.
        join: (weights [out, in] of several layers) → one weight with the rows of all.
    """

    forward: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    of_inputs: Callable[[Tensor, Tensor], Tensor] = _at_once
    of_weight: Callable[[Tensor, Tensor], Tensor] = _at_once
    for_forward: Callable[[Tensor], Tensor] = lambda weight: weight
    for_inputs: Callable[[Tensor], Tensor] = lambda weight: weight
    join: Callable[[Sequence[Tensor]], Tensor] = lambda weights: torch.cat(list(weights))

    @property
    def splits(self) -> bool:
        """Whether the two gradients can be computed separately."""
        return self.of_inputs is not _at_once and self.of_weight is not _at_once


def rows(tensor: Tensor) -> Tensor:
    """[..., n] → [rows, n]."""
    return tensor.flatten(0, -2)


PLAIN = Product(
    forward=lambda inputs, weight, bias: F.linear(inputs, weight, bias),
    of_inputs=lambda gradient, weight: gradient @ weight,
    of_weight=lambda gradient, inputs: rows(gradient).t() @ rows(inputs),
)


def product_of(layer: nn.Module) -> Product:
    """The product of a layer, which must have passed `take_over` or have an empty `departure`."""
    product: Product = getattr(layer, ATTRIBUTE, PLAIN)
    return product


def take_over(
    module: nn.Module, path: str, *, key: str, value: object, cure: str, like: type[nn.Module] = nn.Linear
) -> Product:
    """Check that other code may compute a module, before its `forward` is replaced; returns a linear layer's product.

    Args:
        key, value, cure: for the error message: the setting that needs other code in the module's place, and a cure.

    Raises:
        ConfigError: the module does not compute what `like` computes.
    """
    hooked = has_hooks(module)
    how = "has hooks" if hooked else departure(module, like)
    if how:
        if like is nn.Linear and not hooked:
            cure += ", or let the layer name its product (docs/extending.md)"
        raise ConfigError(key, value, f"computes {path} as {like.__name__} does, and {path} {how}", cure)
    product = product_of(module)
    if like is nn.Linear:
        # The caller replaces `forward`, so this attribute must say what the layer computes.
        setattr(module, ATTRIBUTE, product)
    return product


def has_hooks(module: nn.Module) -> bool:
    """Whether calls of a module run more than its forward."""
    return any(getattr(module, hooks) for hooks in _HOOKS)


def departure(module: nn.Module, like: type[nn.Module] = nn.Linear) -> str:
    """In words, how a module computes differently from `like` with the same parameters; empty: it does not.

    A linear layer with its own forward may name its product in the class or object that defines this forward, or in a
    derived one.
    """
    if parametrize.is_parametrized(module):
        return "is parametrized"
    definer = _definer(module, "forward", "__call__", ATTRIBUTE) if like is nn.Linear else None
    if definer is not None and ATTRIBUTE in vars(definer):
        return ""
    definer = _definer(module, "forward", "__call__")
    if definer is not _definer(like, "forward") and not (like is nn.Linear and _multiplies_table(module)):
        return f"has another forward ({type(module).__name__})"
    for name, parameter in module.named_parameters(recurse=False):
        local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
        if type(local) not in (Tensor, nn.Parameter, FakeTensor):
            return f"has another kind of {name} ({type(local).__name__})"
    return ""


def _definer(owner: Any, *names: str) -> Any:
    """The object or class that defines one of these attributes, the first in Python's order of lookup."""
    places = owner.__mro__ if isinstance(owner, type) else (owner, *type(owner).__mro__)
    return next((place for place in places if any(name in vars(place) for name in names)), None)


def _multiplies_table(head: nn.Module) -> bool:
    """Whether a head that is called with the embedding's table computes hidden · tableᵀ + bias; tries an example."""
    if "weight" in head._parameters or _definer(head, "forward", "__call__") is head:
        return False
    hidden, table = (torch.linspace(-1, 2, 2 * n, device="cpu").view(n, 2) for n in (1, 3))
    bias = None if getattr(head, "bias", None) is None else torch.linspace(-2, 1, 3, device="cpu")
    settings = {name: value for name, value in vars(head).items() if not name.startswith("_")}
    try:
        logits = type(head).forward(SimpleNamespace(**{**settings, "bias": bias}), hidden.unsqueeze(0), table)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return False
    return isinstance(logits, Tensor) and torch.equal(logits.squeeze(0), F.linear(hidden, table, bias))
