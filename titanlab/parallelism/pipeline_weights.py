"""Deferred gradients of weights: the W of zero-bubble schedules (arXiv 2401.10241); see docs/decisions/0011.

Only linear layers, which have nearly all of the work, defer their product; everything else is computed at once.
Compiled code must not have side effects, so in compiled blocks a block gets two more input tensors (taps) for each of
its linear layers, with the shapes of the layer's output and input. The layer's backward returns the two factors of its
weight's gradient as the gradients of the taps; the weight itself gets none there.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

# Private, the same in torch 2.11 to 2.13.
from torch.utils._python_dispatch import _disable_current_modes

from titanlab.dtensor import distributed_like, in_gradient_dtype, local_part
from titanlab.techniques.precision.product import PLAIN, Product, departure, product_of, rows

_TAPS = "weight_taps"


class Deferring(Protocol):
    """An object that can defer products; `DeferredWeights` is one."""

    probe: Probe | None

    def weight_gradient(
        self, product: Product, weight: nn.Parameter, inputs: Tensor, gradient: Tensor
    ) -> Tensor | None:
        """The gradient of a weight, or None if its product is deferred."""


class _Shapes(NamedTuple):
    """A layer's output and input as meta tensors, [rows, n]."""

    output: Tensor
    inputs: Tensor


class Probe:
    """Records the shapes of the inputs and outputs of a block's layers.

    Attributes:
        seen: shapes by layer, as tensors without storage.
        repeated: whether a layer was called more than once, so that its calls' factors cannot be distinguished.
    """

    def __init__(self) -> None:
        self.seen: dict[nn.Module, _Shapes] = {}
        self.repeated = False

    def note(self, layer: nn.Module, inputs: Tensor, output: Tensor) -> Tensor:
        """Record a call; return its output."""
        self.repeated |= layer in self.seen
        self.seen[layer] = _Shapes(rows(output).to("meta"), rows(inputs).to("meta"))
        return output


class TappedForward:
    """The compiled forward of a block, with taps that defer the products of its layers."""

    def __init__(self, compiled: Callable[..., Any], layers: Sequence[nn.Module], deferred: Deferring) -> None:
        self._compiled, self._layers, self._deferred = compiled, layers, deferred
        self._probes: dict[tuple[Any, ...], Probe] = {}

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._compiled(*inputs, **named)
        key = tuple((x.shape, x.dtype) for x in (*inputs, *named.values()) if isinstance(x, Tensor))
        if key not in self._probes:
            self._probes[key] = self._run_probe(inputs, named)
        probe = self._probes[key]
        layers = [layer for layer in self._layers if layer in probe.seen and layer.weight.requires_grad]
        if probe.repeated or not layers:
            return self._compiled(*inputs, **named)
        shapes, weights = [probe.seen[layer] for layer in layers], [layer.weight for layer in layers]
        taps = _Taps.apply(self._deferred, [product_of(layer) for layer in layers], shapes, *weights)  # type: ignore[no-untyped-call]
        for index, layer in enumerate(layers):
            setattr(layer, _TAPS, taps[2 * index : 2 * index + 2])
        try:
            return self._compiled(*inputs, **named)
        finally:
            for layer in layers:
                delattr(layer, _TAPS)

    def _run_probe(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> Probe:
        """Record shapes in one forward in eager mode; a collective call."""
        self._deferred.probe = probe = Probe()
        devices = {layer.weight.device for layer in self._layers} - {torch.device("cpu")}
        try:
            with (
                torch.no_grad(),
                torch.random.fork_rng(devices=devices),
                torch.compiler.set_stance("force_eager"),
                # This forward is not part of a step, so tracing must not count its communication.
                _disable_current_modes(),
            ):
                self._compiled(*inputs, **named)
        finally:
            self._deferred.probe = None
        return probe


def tapped(layer: nn.Module, inputs: Tensor, bias: Tensor | None) -> Tensor:
    """A layer's product inside compiled code; see the module's docstring."""
    weight, product, taps = layer.weight, product_of(layer), taps_of(layer)
    assert isinstance(weight, Tensor)
    if taps is None:
        return product.forward(inputs, local_part(weight), bias)
    return tap(product.forward(inputs, local_part(weight.detach()), bias), inputs, taps)


def taps_of(layer: nn.Module) -> tuple[Tensor, Tensor] | None:
    """The two taps of a layer; None: the gradient of its weight is not deferred."""
    taps: tuple[Tensor, Tensor] | None = getattr(layer, _TAPS, None)
    return taps


def tap(output: Tensor, inputs: Tensor, taps: tuple[Tensor, Tensor]) -> Tensor:
    """A layer's output, whose backward returns the factors of the weight's gradient as the gradients of the taps."""
    tapped_output: Tensor = _Tap.apply(output, inputs, *taps)  # type: ignore[no-untyped-call]
    return tapped_output


class _Tap(torch.autograd.Function):
    """Identity in the forward; the backward returns the factors of a weight's gradient as the gradients of two taps."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, inputs: Tensor, output_tap: Tensor, input_tap: Tensor) -> Tensor:
        ctx.save_for_backward(inputs)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (inputs,) = ctx.saved_tensors
        # As rows, like the operands of the backward's products: otherwise inductor would not fuse these with gathers.
        return gradients[0], None, rows(gradients[0]), rows(inputs)


class _Taps(torch.autograd.Function):
    """Creates two taps per layer outside compiled code; the backward makes weights' gradients from theirs."""

    @staticmethod
    def forward(
        ctx: Any, deferred: Deferring, products: Sequence[Product], shapes: Sequence[_Shapes], *weights: nn.Parameter
    ) -> tuple[Tensor, ...]:
        # The parameters themselves, because their `grad` is written; saved tensors may be copies.
        ctx.deferred, ctx.products, ctx.weights = deferred, products, weights
        return tuple(
            # Expanded from one number, so that a tap needs no memory.
            torch.zeros((), dtype=shape.dtype, device=weight.device).expand(shape.shape)
            for weight, pair in zip(weights, shapes, strict=True)
            for shape in pair
        )

    @staticmethod
    def backward(ctx: Any, *factors: Tensor) -> tuple[Tensor | None, ...]:
        gradients = [
            ctx.deferred.weight_gradient(product, weight, inputs, gradient)
            for product, weight, gradient, inputs in zip(
                ctx.products, ctx.weights, factors[::2], factors[1::2], strict=True
            )
        ]
        return None, None, None, *gradients


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
        products = self._by_microbatch.pop(microbatch)
        while products:
            _accumulate(products.pop())

    def clear(self) -> None:
        self._by_microbatch.clear()

    def weight_gradient(
        self, product: Product, weight: nn.Parameter, inputs: Tensor, gradient: Tensor
    ) -> Tensor | None:
        """The gradient of a weight; None inside `collect`, which defers the product."""
        if self._collecting is None:
            whole: Tensor = distributed_like(weight, product.of_weight(gradient, inputs))
            return whole
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
        weight.grad = distributed_like(weight, in_gradient_dtype(weight, product.of_weight(gradient, inputs)))
    elif product is PLAIN and weight.grad.dtype == inputs.dtype:
        # One operation: no second matrix of the weight's size, and one rounding.
        local_part(weight.grad).addmm_(rows(gradient).t(), rows(inputs))
    else:
        local_part(weight.grad).add_(product.of_weight(gradient, inputs))
