"""Matrix products of linear layers: one product for layers with the same input, and deferred gradients of weights.

Layers that share a product keep their own parameters (docs/decisions/0040). Deferred gradients are the W of zero-bubble
schedules (arXiv 2401.10241; docs/decisions/0011). Only linear layers, which do nearly all of the work, defer their
product; everything else is computed at once. Compiled code must not have side effects. So a compiled block gets two
more input tensors (taps) for each of its linear layers, with the shapes of the layer's output and input. The layer's
backward returns the two factors of its weight's gradient as the gradients of the taps; the weight itself gets no
gradient there.
"""

from __future__ import annotations

import contextlib
import fnmatch
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

# A private module, which is the same in torch 2.11 to 2.13.
from torch.utils._python_dispatch import _disable_current_modes

from titanlab.costs import Joined
from titanlab.dtensor import distributed_like, in_gradient_dtype, local_part
from titanlab.errors import ConfigError
from titanlab.techniques.model.language_model import Projections
from titanlab.techniques.precision.product import JOINED, PLAIN, Product, departure, product_of, rows, take_over

if TYPE_CHECKING:
    from titanlab.parallelism.tensor import TensorParallel

# For each layer, its output and input as meta tensors [rows, n]; None for a layer that was called more than once.
_Shapes = dict[nn.Module, tuple[Tensor, Tensor] | None]
# Names of a layer's attributes: the `DeferredWeights` of its stage, and in compiled code the layer's two taps.
_DEFERRED, _TAPS = "deferred_weights", "weight_taps"


def linear(layer: nn.Module, inputs: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute inputs · weightᵀ + bias with this rank's part of the layer's weight, whose gradient may be deferred.

    inputs: plain tensor [batch, seq, this rank's columns of the weight] → [batch, seq, this rank's rows of it].
    """
    return products((layer,), inputs, (False,), bias)[0]


def products(
    layers: Sequence[nn.Module], inputs: Tensor, copied: tuple[bool, ...], bias: Tensor | None = None
) -> tuple[Tensor, ...]:
    """The outputs of layers for inputs [..., in], as one matrix product; the gradients of weights may be deferred.

    Args:
        copied: for each layer, whether its output gets its own memory; other outputs are views of one tensor.
        bias: only for a single layer.
    """
    product = product_of(layers[0])
    weights = [cast(Tensor, layer.weight) for layer in layers]
    taps: list[Any] = []
    deferred: DeferredWeights | None = None
    if product.splits and torch.compiler.is_compiling():
        taps = [getattr(layer, _TAPS, None) for layer in layers]
        if any(pair is None for pair in taps):
            taps = []
    elif product.splits:
        deferred = getattr(layers[0], _DEFERRED, None)
    probe = None if deferred is None else deferred.probe
    if probe is not None:
        deferred = None
    if deferred is None:
        weights = [local_part(weight.detach() if taps else weight) for weight in weights]

    outputs: tuple[Tensor, ...]
    if len(weights) == 1 and deferred is None:
        outputs = (product.forward(inputs, weights[0], bias),)
    elif torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (inputs, *weights)):
        outputs = _Products.apply(inputs, product, copied, bias, deferred, *weights)  # type: ignore[no-untyped-call]
    else:
        # Without gradients, avoid `_Products`: torch 2.13's dynamo would call its `forward` without `ctx` if there are
        # as many arguments as parameters, with `*weights` counted as one parameter.
        outputs = _outputs(inputs, product, copied, bias, weights)
    if taps:
        pairs = zip(outputs, taps, strict=True)
        return tuple(_Tap.apply(output, inputs, *pair) for output, pair in pairs)  # type: ignore[no-untyped-call]
    if probe is not None:
        for layer, output in zip(layers, outputs, strict=True):
            # A layer that is called more than once gets None: the factors of its calls could not be distinguished.
            probe[layer] = None if layer in probe else (rows(output).to("meta"), rows(inputs).to("meta"))
    return outputs


def _outputs(
    inputs: Tensor, product: Product, copied: tuple[bool, ...], bias: Tensor | None, weights: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    parts = [local_part(weight) for weight in weights]
    if len(parts) == 1:
        return (product.forward(inputs, parts[0], bias),)
    outputs = product.forward(inputs, product.join(parts), None).split([part.shape[0] for part in parts], -1)
    return tuple(output.clone() if copy else output for output, copy in zip(outputs, copied, strict=True))


class _Products(torch.autograd.Function):
    """Forward: one product; backward: two products for each weight; the one for its gradient may be deferred."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        product: Product,
        copied: tuple[bool, ...],
        bias: Tensor | None,
        deferred: DeferredWeights | None,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.product, ctx.deferred = product, deferred
        if deferred is None:
            ctx.save_for_backward(inputs, *weights)
        else:
            # Keep the parameters themselves, because their `grad` is written; saved tensors may be copies.
            ctx.weights = weights
            ctx.save_for_backward(inputs)
        return _outputs(inputs, product, copied, bias, weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs, *weights = ctx.saved_tensors
        product, deferred = ctx.product, ctx.deferred
        if deferred is not None:
            weights = ctx.weights
        of_inputs: Tensor | None = None
        if ctx.needs_input_grad[0]:
            parts = [local_part(weight) for weight in weights]
            of_inputs = product.of_inputs(gradients[0], parts[0])
            for gradient, part in zip(gradients[1:], parts[1:], strict=True):
                if product is PLAIN:
                    # One operation: no second tensor of the input's size.
                    of_inputs = torch.addmm(rows(of_inputs), rows(gradient), part).view(of_inputs.shape)
                else:
                    of_inputs = of_inputs + product.of_inputs(gradient, part)
        of_bias = rows(gradients[0]).sum(0) if ctx.needs_input_grad[3] else None
        of_weights: list[Tensor | None] = []
        for number, (gradient, weight) in enumerate(zip(gradients, weights, strict=True)):
            if not ctx.needs_input_grad[5 + number]:
                of_weights.append(None)
            elif deferred is None:
                of_weights.append(product.of_weight(gradient, inputs))
            else:
                of_weights.append(deferred.weight_gradient(product, weight, inputs, gradient))
        return of_inputs, None, None, of_bias, None, *of_weights


def join_products(model: nn.Module, joined: Iterable[Joined], cut: TensorParallel | None) -> None:
    """Let layers of a model or stage with the same input be computed as one matrix product, in place.

    Args:
        cut: how tensor parallelism has cut the layers; None: the layers are not cut.

    Raises:
        ConfigError: a layer has its own forward or product.
    """
    for product in joined:
        for path, module in list(model.named_modules()):
            if path.count(".") == product.caller.count(".") and fnmatch.fnmatchcase(path, product.caller):
                assert isinstance(module, Projections), path
                owner, _, own_name = path.rpartition(".")
                parent = model.get_submodule(owner)
                setting: Any = {"key": "model.fused", "value": "true", "cure": "try false"}
                take_over(module, path, like=Projections, **setting)
                layers = {name: parent.get_submodule(name) for name in product.layers}
                found = [take_over(layer, f"{owner}.{name}", **setting) for name, layer in layers.items()]
                if any(other is not found[0] for other in found) or not found[0].splits:
                    rule = f"multiplies {', '.join(layers)} of {owner} as one product, which they do not share"
                    raise ConfigError(**setting, rule=rule)
                for name, layer in layers.items():
                    # A joined product adds no biases.
                    assert getattr(layer, "bias", None) is None, f"{owner}.{name}"
                    setattr(layer, JOINED, path)
                copied = tuple(name in product.copied for name in product.layers)
                parent.add_module(own_name, JoinedProjections(copied, cut))


class JoinedProjections(Projections):
    """Multiplies an input with the weights of all layers at once.

    Args:
        copied: for each layer, whether its output gets its own memory; other outputs are views of one tensor.
    """

    def __init__(self, copied: tuple[bool, ...], cut: TensorParallel | None) -> None:
        super().__init__()
        self.copied, self.cut = copied, cut

    def forward(self, inputs: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
        outputs = products(layers, inputs, self.copied)
        cut = self.cut
        return outputs if cut is None else tuple(cut.by_sequence(output) for output in outputs)


class DeferredWeights:
    """The deferred products of the linear layers of one stage, by microbatch.

    Attributes:
        probe: records the shapes of layers' outputs and inputs while it is set.
    """

    def __init__(self, module: nn.Module) -> None:
        """Defer the products of all linear layers whose two gradients can be computed separately, and of all layers
        whose forward calls `products`.

        Other layers compute the gradient of their weight together with that of their input.
        """
        self.probe: _Shapes | None = None
        self._collecting: list[_Deferred] | None = None
        self._by_microbatch: dict[int, list[_Deferred]] = {}
        for layer in module.modules():
            if isinstance(layer, nn.Linear):
                setattr(layer, _DEFERRED, self)
                if "forward" not in vars(layer) and not departure(layer) and product_of(layer).splits:
                    # As a method, so that torch.compile sees one function for all layers.
                    layer.forward = types.MethodType(_forward, layer)  # type: ignore[method-assign]
        for block in module.modules():
            if hasattr(vars(block).get("forward"), "get_compiler_config"):
                layers = [layer for layer in block.modules() if hasattr(layer, _DEFERRED)]
                block.forward = TappedForward(block.forward, layers, self)

    @contextlib.contextmanager
    def collect(self, microbatch: int) -> Iterator[None]:
        """Inside this context, a backward defers the products for the gradients of weights."""
        self._collecting = self._by_microbatch[microbatch] = []
        try:
            yield
        finally:
            self._collecting = None

    @torch.no_grad()
    def compute(self, microbatch: int) -> None:
        deferred = self._by_microbatch.pop(microbatch)
        while deferred:
            product, weight, inputs, gradient = deferred.pop()
            total = add_product(product, local_part(weight.grad), gradient, inputs)
            if weight.grad is None:
                weight.grad = distributed_like(weight, in_gradient_dtype(weight, total))

    def clear(self) -> None:
        self._by_microbatch.clear()

    def weight_gradient(self, product: Product, weight: Tensor, inputs: Tensor, gradient: Tensor) -> Tensor | None:
        """The gradient of a weight; None inside `collect`, which defers the product."""
        if self._collecting is None:
            whole: Tensor = distributed_like(weight, product.of_weight(gradient, inputs))
            return whole
        self._collecting.append(_Deferred(product, weight, inputs, gradient))
        return None


def add_product(product: Product, total: Tensor | None, gradient: Tensor, inputs: Tensor) -> Tensor:
    """The sum of `total` (a plain tensor, changed in place, or None) and the product for the gradient of a weight."""
    if total is None:
        return product.of_weight(gradient, inputs)
    if product is PLAIN and total.dtype == inputs.dtype:
        # One operation: no second matrix of the weight's size, and one rounding.
        return total.addmm_(rows(gradient).t(), rows(inputs))
    return total.add_(product.of_weight(gradient, inputs))


class _Deferred(NamedTuple):
    product: Product
    weight: Tensor
    inputs: Tensor
    gradient: Tensor


def _forward(layer: nn.Linear, inputs: Tensor) -> Tensor:
    return linear(layer, inputs, layer.bias)


class TappedForward:
    """The compiled forward of a block, with taps that defer the products of its layers."""

    def __init__(self, compiled: Callable[..., Any], layers: Sequence[nn.Module], deferred: DeferredWeights) -> None:
        self._compiled, self._layers, self._deferred = compiled, layers, deferred
        self._shapes: dict[tuple[Any, ...], _Shapes] = {}

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._compiled(*inputs, **named)
        key = tuple((x.shape, x.dtype) for x in (*inputs, *named.values()) if isinstance(x, Tensor))
        if key not in self._shapes:
            self._shapes[key] = self._probed(inputs, named)
        seen = self._shapes[key]
        layers = [layer for layer in self._layers if layer in seen and layer.weight.requires_grad]
        shapes = [shape for layer in layers if (shape := seen[layer]) is not None]
        if not layers or None in seen.values():
            return self._compiled(*inputs, **named)
        weights = [layer.weight for layer in layers]
        taps = _Taps.apply(self._deferred, [product_of(layer) for layer in layers], shapes, *weights)  # type: ignore[no-untyped-call]
        for index, layer in enumerate(layers):
            setattr(layer, _TAPS, taps[2 * index : 2 * index + 2])
        try:
            return self._compiled(*inputs, **named)
        finally:
            for layer in layers:
                delattr(layer, _TAPS)

    def _probed(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> _Shapes:
        """The layers' shapes, recorded in one forward in eager mode; all ranks have to call this."""
        probe: _Shapes = {}
        self._deferred.probe = probe
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


class _Tap(torch.autograd.Function):
    """Identity in the forward; the backward returns the factors of a weight's gradient as the gradients of two taps."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, inputs: Tensor, output_tap: Tensor, input_tap: Tensor) -> Tensor:
        ctx.save_for_backward(inputs)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (inputs,) = ctx.saved_tensors
        # Shaped as rows, like the operands of the backward's products: otherwise inductor would not fuse the products
        # with gathers.
        return gradients[0], None, rows(gradients[0]), rows(inputs)


class _Taps(torch.autograd.Function):
    """Creates two taps per layer outside compiled code; the taps' gradients are the factors of weights' gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        deferred: DeferredWeights,
        layer_products: Sequence[Product],
        shapes: Sequence[tuple[Tensor, Tensor]],
        *weights: nn.Parameter,
    ) -> tuple[Tensor, ...]:
        # Keep the parameters themselves, because their `grad` is written; saved tensors may be copies.
        ctx.deferred, ctx.products, ctx.weights = deferred, layer_products, weights
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
