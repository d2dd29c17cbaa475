"""Gradients of weights that are computed later than those of inputs: the W of schedules without bubbles.

torch's own way of splitting a backward walks the graph in Python for every microbatch and runs autograd once for
every weight; checkpointed blocks are computed again each time, compiled ones twice, and FSDP2 gives wrong gradients
where it frees parameters in between. Here the linear layers, where nearly all of the work is, set their product aside
while a backward for the inputs runs; everything else is computed at once. (Zero bubble pipeline parallelism, arXiv
2401.10241.)
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_ATTRIBUTE = "deferred_weights"


class DeferredWeights:
    """Products that are still to be computed, by microbatch, of the linear layers of one stage."""

    def __init__(self, module: nn.Module) -> None:
        """From now on every plain linear layer in the module, and every layer that calls `linear`, asks here.

        A layer of another kind (quantised or compiled, say) computes its weight's gradient with its input's.
        """
        self._open: list[_Product] | None = None
        self._waiting: dict[int, list[_Product]] = {}
        for layer in module.modules():
            if isinstance(layer, nn.Linear):
                setattr(layer, _ATTRIBUTE, self)
                if type(layer).forward is nn.Linear.forward and "forward" not in vars(layer):
                    # As a method, so that compilers find one function for all layers.
                    layer.forward = types.MethodType(_forward, layer)  # type: ignore[method-assign]

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

    def put(self, weight: nn.Parameter, inputs: Tensor, gradient: Tensor) -> bool:
        """Set a product aside; False outside of `collect`, where it is to be computed at once."""
        if self._open is None:
            return False
        self._open.append(_Product(weight, inputs, gradient))
        return True


def linear(layer: nn.Module, inputs: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product inputs · weightᵀ + bias with what this rank has of the layer's weight; its gradient may come later.

    inputs: plain, [batch, seq, of this rank's columns] → [batch, seq, of this rank's rows].
    """
    weight = layer.weight
    assert isinstance(weight, Tensor)
    deferred = getattr(layer, _ATTRIBUTE, None)
    # Compilers do not see what is set aside.
    if deferred is None or torch.compiler.is_compiling() or not (torch.is_grad_enabled() and weight.requires_grad):
        return F.linear(inputs, _local(weight), bias)
    output: Tensor = _DeferredLinear.apply(inputs, weight, bias, deferred)
    return output


class _Product(NamedTuple):
    weight: nn.Parameter
    inputs: Tensor
    gradient: Tensor


def _forward(layer: nn.Linear, inputs: Tensor) -> Tensor:
    return linear(layer, inputs, layer.bias)


class _DeferredLinear(torch.autograd.Function):
    """`F.linear` whose backward may leave the weight's gradient for later."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: nn.Parameter, bias: Tensor | None, deferred: DeferredWeights
    ) -> Tensor:
        # The parameter itself, and no saved tensor, which may be a copy: its `grad` is written.
        ctx.weight, ctx.deferred = weight, deferred
        ctx.save_for_backward(inputs)
        return F.linear(inputs, _local(weight), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (inputs,), weight = gradients, ctx.saved_tensors, ctx.weight
        of_inputs = gradient @ _local(weight) if ctx.needs_input_grad[0] else None
        of_bias = _rows(gradient).sum(0) if ctx.needs_input_grad[2] else None
        if ctx.deferred.put(weight, inputs, gradient):
            return of_inputs, None, of_bias, None
        return of_inputs, _like(weight, _rows(gradient).t() @ _rows(inputs)), of_bias, None


@torch.no_grad()
def _accumulate(product: _Product) -> None:
    weight, inputs, gradient = product.weight, _rows(product.inputs), _rows(product.gradient)
    if weight.grad is None:
        weight.grad = _like(weight, gradient.t() @ inputs)
    else:
        # In one pass: no second matrix of the weight's size, and one rounding.
        _local(weight.grad).addmm_(gradient.t(), inputs)


def _local(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    local: Tensor = tensor.to_local()
    return local


def _like(weight: Tensor, local: Tensor) -> Tensor:
    """This rank's part of a gradient as the weight is."""
    if not isinstance(weight, DTensor):
        return local
    return DTensor.from_local(
        local, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )


def _rows(tensor: Tensor) -> Tensor:
    return tensor.flatten(0, -2)
