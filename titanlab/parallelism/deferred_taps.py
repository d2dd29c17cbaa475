"""How compiled blocks set the products for their weights' gradients aside.

Compiled code has no side effects, so what is set aside leaves it as a gradient. A block is handed two more tensors for
each of its linear layers, of the shapes of what the layer gives and is given. No number of them is used; but their
gradients, says the layer's backward, are the two factors of its weight's gradient. The weight itself gets none in the
compiled code, from which its product is gone: what nobody asks for, a compiler does not compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

# Private, and in torch 2.11 as in 2.13.
from torch.utils._python_dispatch import _disable_current_modes

from titanlab.parallelism.local import local_part
from titanlab.precision.product import Product, product_of, rows

_TAPS = "weight_taps"


class Deferring(Protocol):
    """What sets products aside."""

    probe: Probe | None

    def weight_gradient(
        self, product: Product, weight: nn.Parameter, inputs: Tensor, gradient: Tensor
    ) -> Tensor | None:
        """The gradient of a weight, or None where its product is set aside."""


class _Seen(NamedTuple):
    """Of a layer, [rows, n]."""

    output: Tensor
    inputs: Tensor


class Probe:
    """What the layers of a block give and are given.

    Attributes:
        seen: by layer, without storage.
        repeated: a layer was called more than once, and its two factors cannot be told apart.
    """

    def __init__(self) -> None:
        self.seen: dict[nn.Module, _Seen] = {}
        self.repeated = False

    def note(self, layer: nn.Module, inputs: Tensor, output: Tensor) -> Tensor:
        """Note a call; its output."""
        self.repeated |= layer in self.seen
        self.seen[layer] = _Seen(*(rows(each).to("meta") for each in (output, inputs)))
        return output


class TappedForward:
    """The compiled forward of a block, beside which its layers' products are set aside."""

    def __init__(self, compiled: Callable[..., Any], layers: Sequence[nn.Module], deferred: Deferring) -> None:
        self._compiled, self._layers, self._deferred = compiled, layers, deferred
        self._known: dict[tuple[Any, ...], Probe] = {}

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """The block's output."""
        if not torch.is_grad_enabled():
            return self._compiled(*inputs, **named)
        given = tuple((each.shape, each.dtype) for each in (*inputs, *named.values()) if isinstance(each, Tensor))
        if given not in self._known:
            self._known[given] = self._probed(inputs, named)
        probe = self._known[given]
        layers = [layer for layer in self._layers if layer in probe.seen and layer.weight.requires_grad]
        if probe.repeated or not layers:
            return self._compiled(*inputs, **named)
        seen, weights = [probe.seen[layer] for layer in layers], [layer.weight for layer in layers]
        taps = _Taps.apply(self._deferred, [product_of(layer) for layer in layers], seen, *weights)  # type: ignore[no-untyped-call]
        for index, layer in enumerate(layers):
            setattr(layer, _TAPS, taps[2 * index : 2 * index + 2])
        try:
            return self._compiled(*inputs, **named)
        finally:
            for layer in layers:
                delattr(layer, _TAPS)

    def _probed(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> Probe:
        """Shapes, by a forward in eager mode: once, on all ranks together."""
        self._deferred.probe = probe = Probe()
        devices = {layer.weight.device for layer in self._layers} - {torch.device("cpu")}
        try:
            with (
                torch.no_grad(),
                torch.random.fork_rng(devices=devices),
                torch.compiler.set_stance("force_eager"),
                # Whoever counts what a step sends counts steps.
                _disable_current_modes(),
            ):
                self._compiled(*inputs, **named)
        finally:
            self._deferred.probe = None
        return probe


def tapped(layer: nn.Module, inputs: Tensor, bias: Tensor | None) -> Tensor:
    """A layer's product inside of compiled code; see the module."""
    weight, product, taps = layer.weight, product_of(layer), getattr(layer, _TAPS, None)
    assert isinstance(weight, Tensor)
    if taps is None:
        return product.forward(inputs, local_part(weight), bias)
    output: Tensor = _Tap.apply(product.forward(inputs, local_part(weight.detach()), bias), inputs, *taps)  # type: ignore[no-untyped-call]
    return output


class _Tap(torch.autograd.Function):
    """Nothing, forward; backward the factors of a weight's gradient become those of two tensors that nobody uses."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, inputs: Tensor, of_output: Tensor, of_inputs: Tensor) -> Tensor:
        ctx.save_for_backward(inputs)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (inputs,) = ctx.saved_tensors
        # As rows, which the products of the backward take too: otherwise inductor would not fuse them with gathers.
        return gradients[0], None, rows(gradients[0]), rows(inputs)


class _Taps(torch.autograd.Function):
    """Two tensors a layer, outside of compiled code: to their gradients belongs the weight's."""

    @staticmethod
    def forward(
        ctx: Any, deferred: Deferring, products: Sequence[Product], seen: Sequence[_Seen], *weights: nn.Parameter
    ) -> tuple[Tensor, ...]:
        # The parameters themselves, and no saved tensors, which may be copies: their `grad` is written.
        ctx.deferred, ctx.products, ctx.weights = deferred, products, weights
        return tuple(
            # One number, whatever the shape.
            torch.zeros((), dtype=each.dtype, device=weight.device).expand(each.shape)
            for weight, pair in zip(weights, seen, strict=True)
            for each in pair
        )

    @staticmethod
    def backward(ctx: Any, *factors: Tensor) -> tuple[Tensor | None, ...]:
        found = [
            ctx.deferred.weight_gradient(product, weight, inputs, gradient)
            for product, weight, gradient, inputs in zip(
                ctx.products, ctx.weights, factors[::2], factors[1::2], strict=True
            )
        ]
        return None, None, None, *found
