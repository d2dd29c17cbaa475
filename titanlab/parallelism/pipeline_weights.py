"""Gradients of weights that are computed later than those of inputs: the W of schedules without bubbles.

torch's own way of splitting a backward walks the graph in Python for every microbatch and runs autograd once for
every weight; checkpointed blocks are computed again each time, compiled ones twice, and FSDP2 gives wrong gradients
where it frees parameters in between. Here the linear layers, where nearly all of the work is, set their product aside
while a backward for the inputs runs; everything else is computed at once. Those of compiled blocks do so too, see
`deferred_taps`. (Zero bubble pipeline parallelism, arXiv 2401.10241.)
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlab.parallelism.deferred_taps import Probe, TappedForward, tapped
from titanlab.parallelism.local import local_part
from titanlab.precision.product import ATTRIBUTE, PLAIN, Product, product_of, rows

_ATTRIBUTE = "deferred_weights"


class DeferredWeights:
    """Products that are still to be computed, by microbatch, of the linear layers of one stage.

    Attributes:
        probe: is told what layers are given, while somebody asks.
    """

    def __init__(self, module: nn.Module) -> None:
        """From now on every linear layer of which the product is known in halves, and what calls `linear`, asks here.

        A layer of another kind computes its weight's gradient with its input's.
        """
        self.probe: Probe | None = None
        self._open: list[_Waiting] | None = None
        self._waiting: dict[int, list[_Waiting]] = {}
        for layer in module.modules():
            if isinstance(layer, nn.Linear):
                setattr(layer, _ATTRIBUTE, self)
                known = type(layer).forward is nn.Linear.forward or hasattr(layer, ATTRIBUTE)
                if known and "forward" not in vars(layer):
                    # As a method, so that compilers find one function for all layers.
                    layer.forward = types.MethodType(_forward, layer)  # type: ignore[method-assign]
        for block in module.modules():
            if hasattr(vars(block).get("forward"), "get_compiler_config"):
                layers = [layer for layer in block.modules() if hasattr(layer, _ATTRIBUTE)]
                block.forward = TappedForward(block.forward, layers, self)

    @contextlib.contextmanager
    def collect(self, microbatch: int) -> Iterator[None]:
        """What a backward inside the block would compute of weights' gradients is set aside."""
        self._open = self._waiting[microbatch] = []
        try:
            yield
        finally:
            self._open = None

    def compute(self, microbatch: int) -> None:
        """Add to the gradients of weights what was set aside."""
        products = self._waiting.pop(microbatch)
        while products:
            _accumulate(products.pop())

    def clear(self) -> None:
        """Forget what was set aside."""
        self._waiting.clear()

    def weight_gradient(
        self, product: Product, weight: nn.Parameter, inputs: Tensor, gradient: Tensor
    ) -> Tensor | None:
        """The gradient of a weight, or None: inside of `collect` its product is set aside."""
        if self._open is None:
            return _like(weight, product.of_weight(gradient, inputs))
        self._open.append(_Waiting(product, weight, inputs, gradient))
        return None


def linear(layer: nn.Module, inputs: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product inputs · weightᵀ + bias with what this rank has of the layer's weight; its gradient may come later.

    inputs: plain, [batch, seq, of this rank's columns] → [batch, seq, of this rank's rows].
    """
    weight, product = layer.weight, product_of(layer)
    assert isinstance(weight, Tensor)
    if torch.compiler.is_compiling():
        return tapped(layer, inputs, bias)
    deferred = getattr(layer, _ATTRIBUTE, None)
    if deferred is not None and deferred.probe is not None:
        noted: Tensor = deferred.probe.note(layer, inputs, product.forward(inputs, local_part(weight), bias))
        return noted
    if deferred is None or not (torch.is_grad_enabled() and weight.requires_grad):
        return product.forward(inputs, local_part(weight), bias)
    output: Tensor = _DeferredLinear.apply(inputs, weight, bias, deferred, product)  # type: ignore[no-untyped-call]
    return output


class _Waiting(NamedTuple):
    product: Product
    weight: nn.Parameter
    inputs: Tensor
    gradient: Tensor


def _forward(layer: nn.Linear, inputs: Tensor) -> Tensor:
    return linear(layer, inputs, layer.bias)


class _DeferredLinear(torch.autograd.Function):
    """A product whose backward may leave the weight's gradient for later."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: nn.Parameter, bias: Tensor | None, deferred: DeferredWeights, product: Product
    ) -> Tensor:
        # The parameter itself, and no saved tensor, which may be a copy: its `grad` is written.
        ctx.weight, ctx.deferred, ctx.product = weight, deferred, product
        ctx.save_for_backward(inputs)
        return product.forward(inputs, local_part(weight), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (inputs,), weight = gradients, ctx.saved_tensors, ctx.weight
        of_inputs = ctx.product.of_inputs(gradient, local_part(weight)) if ctx.needs_input_grad[0] else None
        of_bias = rows(gradient).sum(0) if ctx.needs_input_grad[2] else None
        return of_inputs, ctx.deferred.weight_gradient(ctx.product, weight, inputs, gradient), of_bias, None, None


@torch.no_grad()
def _accumulate(waiting: _Waiting) -> None:
    product, weight, inputs, gradient = waiting
    if weight.grad is None:
        weight.grad = _like(weight, product.of_weight(gradient, inputs))
    elif product is PLAIN:
        # In one pass: no second matrix of the weight's size, and one rounding.
        local_part(weight.grad).addmm_(rows(gradient).t(), rows(inputs))
    else:
        local_part(weight.grad).add_(product.of_weight(gradient, inputs))


def _like(weight: Tensor, local: Tensor) -> Tensor:
    """This rank's part of a gradient as the weight is."""
    if not isinstance(weight, DTensor):
        return local
    return DTensor.from_local(
        local, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )
