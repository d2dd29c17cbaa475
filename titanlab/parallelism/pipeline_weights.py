"""Deferred gradients of weights: the W of zero-bubble schedules (arXiv 2401.10241).

torch's own split backward walks the graph in Python for every microbatch and runs autograd once for every weight; it
recomputes checkpointed blocks each time and compiled blocks twice, and FSDP2 gives wrong gradients where it frees
parameters in between. Here only linear layers, which have nearly all of the work, defer their product during a
backward for the inputs; everything else is computed at once. Layers of compiled blocks: see `deferred_taps`.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlab.dtensor import in_gradient_dtype, local_part
from titanlab.parallelism.deferred_taps import Probe, TappedForward, tapped
from titanlab.techniques.precision.product import PLAIN, Product, departure, product_of, rows

_ATTRIBUTE = "deferred_weights"


class DeferredWeights:
    """The deferred products of the linear layers of one stage, by microbatch.

    Attributes:
        probe: records the shapes of layers' inputs and outputs while it is set.
    """

    def __init__(self, module: nn.Module) -> None:
        """Defer products of all linear layers whose backward is known in two halves, and of callers of `linear`.

        Other layers compute the gradient of their weight together with that of their input.
        """
        self.probe: Probe | None = None
        self._collecting: list[_Deferred] | None = None
        self._by_microbatch: dict[int, list[_Deferred]] = {}
        for layer in module.modules():
            if isinstance(layer, nn.Linear):
                setattr(layer, _ATTRIBUTE, self)
                if "forward" not in vars(layer) and not departure(layer) and product_of(layer).splits:
                    # As a method, so that torch.compile sees one function for all layers.
                    layer.forward = types.MethodType(_forward, layer)  # type: ignore[method-assign]
        for block in module.modules():
            if hasattr(vars(block).get("forward"), "get_compiler_config"):
                layers = [layer for layer in block.modules() if hasattr(layer, _ATTRIBUTE)]
                block.forward = TappedForward(block.forward, layers, self)

    @contextlib.contextmanager
    def collect(self, microbatch: int) -> Iterator[None]:
        """A backward inside the block defers the products for the gradients of weights."""
        self._collecting = self._by_microbatch[microbatch] = []
        try:
            yield
        finally:
            self._collecting = None

    def compute(self, microbatch: int) -> None:
        """Compute the deferred products and add them to the gradients of weights."""
        products = self._by_microbatch.pop(microbatch)
        while products:
            _accumulate(products.pop())

    def clear(self) -> None:
        """Drop all deferred products."""
        self._by_microbatch.clear()

    def weight_gradient(
        self, product: Product, weight: nn.Parameter, inputs: Tensor, gradient: Tensor
    ) -> Tensor | None:
        """The gradient of a weight; None inside `collect`, which defers the product."""
        if self._collecting is None:
            return _like(weight, product.of_weight(gradient, inputs))
        self._collecting.append(_Deferred(product, weight, inputs, gradient))
        return None


def linear(layer: nn.Module, inputs: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute inputs · weightᵀ + bias with this rank's part of the layer's weight, whose gradient may be deferred.

    inputs: plain tensor [batch, seq, this rank's columns of the weight] → [batch, seq, this rank's rows of it].
    """
    weight, product = layer.weight, product_of(layer)
    assert isinstance(weight, Tensor)
    if not product.splits:
        return product.forward(inputs, local_part(weight), bias)
    if torch.compiler.is_compiling():
        return tapped(layer, inputs, bias)
    deferred = deferred_of(layer)
    if deferred is not None and deferred.probe is not None:
        probed: Tensor = deferred.probe.note(layer, inputs, product.forward(inputs, local_part(weight), bias))
        return probed
    if deferred is None or not (torch.is_grad_enabled() and weight.requires_grad):
        return product.forward(inputs, local_part(weight), bias)
    output: Tensor = _DeferredLinear.apply(inputs, weight, bias, deferred, product)  # type: ignore[no-untyped-call]
    return output


def deferred_of(layer: nn.Module) -> DeferredWeights | None:
    """What defers the gradient of a layer's weight; None: nothing does."""
    deferred: DeferredWeights | None = getattr(layer, _ATTRIBUTE, None)
    return deferred


class _Deferred(NamedTuple):
    product: Product
    weight: nn.Parameter
    inputs: Tensor
    gradient: Tensor


def _forward(layer: nn.Linear, inputs: Tensor) -> Tensor:
    return linear(layer, inputs, layer.bias)


class _DeferredLinear(torch.autograd.Function):
    """A product whose backward may defer the weight's gradient."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: nn.Parameter, bias: Tensor | None, deferred: DeferredWeights, product: Product
    ) -> Tensor:
        # The parameter itself, because its `grad` is written; a saved tensor may be a copy.
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
def _accumulate(deferred: _Deferred) -> None:
    product, weight, inputs, gradient = deferred
    if weight.grad is None:
        weight.grad = _like(weight, in_gradient_dtype(weight, product.of_weight(gradient, inputs)))
    elif product is PLAIN and weight.grad.dtype == inputs.dtype:
        # One operation: no second matrix of the weight's size, and one rounding.
        local_part(weight.grad).addmm_(rows(gradient).t(), rows(inputs))
    else:
        local_part(weight.grad).add_(product.of_weight(gradient, inputs))


def _like(weight: Tensor, local: Tensor) -> Tensor:
    """This rank's part of a gradient as a DTensor if the weight is one."""
    if not isinstance(weight, DTensor):
        return local
    return DTensor.from_local(
        local, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )
