"""One product for several linear layers with the same input, which keep their parameters; see docs/decisions/0040."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from titanlab.costs import Joined
from titanlab.dtensor import local_part
from titanlab.errors import ConfigError
from titanlab.parallelism.pipeline_weights import DeferredWeights, deferred_of, tap, taps_of
from titanlab.parallelism.tensor import TensorParallel
from titanlab.techniques.model.language_model import Projections
from titanlab.techniques.precision.product import JOINED, PLAIN, Product, product_of, rows, take_over


def join_products(model: nn.Module, joined: Iterable[Joined], cut: TensorParallel | None) -> None:
    """Compute layers of a model or stage as one product, in place.

    Args:
        cut: how tensor parallelism has cut the layers; None: it has not.

    Raises:
        ConfigError: a layer has a forward or a product of its own.
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
                products = [take_over(layer, f"{owner}.{name}", **setting) for name, layer in layers.items()]
                if any(other is not products[0] for other in products) or not products[0].splits:
                    rule = f"multiplies {', '.join(layers)} of {owner} as one, and they have no product in common"
                    raise ConfigError(**setting, rule=rule)
                for name, layer in layers.items():
                    # A bias would be added to each part, for which there is no code.
                    assert getattr(layer, "bias", None) is None, f"{owner}.{name}"
                    setattr(layer, JOINED, path)
                copied = tuple(name in product.copied for name in product.layers)
                parent.add_module(own_name, JoinedProjections(copied, cut))


class JoinedProjections(Projections):
    """Multiplies an input with the weights of all layers at once.

    Args:
        copied: for each layer, whether its output gets its own memory; the others are parts of one tensor.
    """

    def __init__(self, copied: tuple[bool, ...], cut: TensorParallel | None) -> None:
        super().__init__()
        self.copied, self.cut = copied, cut

    def forward(self, inputs: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
        outputs = joined_product(layers, inputs, self.copied)
        cut = self.cut
        return outputs if cut is None else tuple(cut.by_sequence(output) for output in outputs)


def joined_product(layers: Sequence[nn.Module], inputs: Tensor, copied: tuple[bool, ...]) -> tuple[Tensor, ...]:
    """The outputs of layers for inputs [..., in]; the gradients of their weights may be deferred."""
    product = product_of(layers[0])
    weights = [cast(Tensor, layer.weight) for layer in layers]
    if torch.compiler.is_compiling():
        taps = [taps_of(layer) for layer in layers]
        if any(pair is None for pair in taps):
            return _apply(inputs, product, copied, None, [local_part(weight) for weight in weights])
        outputs = _apply(inputs, product, copied, None, [local_part(weight.detach()) for weight in weights])
        return tuple(tap(output, inputs, cast(Any, pair)) for output, pair in zip(outputs, taps, strict=True))
    deferred = deferred_of(layers[0])
    if deferred is not None and deferred.probe is None and torch.is_grad_enabled():
        return _apply(inputs, product, copied, deferred, weights)
    outputs = _apply(inputs, product, copied, None, [local_part(weight) for weight in weights])
    if deferred is not None and deferred.probe is not None:
        for layer, output in zip(layers, outputs, strict=True):
            deferred.probe.note(layer, inputs, output)
    return outputs


def _apply(
    inputs: Tensor,
    product: Product,
    copied: tuple[bool, ...],
    deferred: DeferredWeights | None,
    weights: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (inputs, *weights))):
        # Without a gradient, torch 2.13's dynamo calls `forward` without `ctx` if the number of arguments is that of
        # its parameters, where `*weights` counts as one: with two weights.
        return _outputs(inputs, product, copied, weights)
    outputs: tuple[Tensor, ...] = _JoinedProduct.apply(inputs, product, copied, deferred, *weights)  # type: ignore[no-untyped-call]
    return outputs


def _outputs(
    inputs: Tensor, product: Product, copied: tuple[bool, ...], weights: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    parts = [local_part(weight) for weight in weights]
    outputs = product.forward(inputs, product.join(parts), None).split([part.shape[0] for part in parts], -1)
    return tuple(output.clone() if copy else output for output, copy in zip(outputs, copied, strict=True))


class _JoinedProduct(torch.autograd.Function):
    """Forward: one product; backward: one product of each kind for each weight."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        product: Product,
        copied: tuple[bool, ...],
        deferred: DeferredWeights | None,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.product, ctx.deferred = product, deferred
        if deferred is None:
            ctx.save_for_backward(inputs, *weights)
        else:
            # The parameters themselves, because their `grad` is written; saved tensors may be copies.
            ctx.weights = weights
            ctx.save_for_backward(inputs)
        return _outputs(inputs, product, copied, weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs, *weights = ctx.saved_tensors
        product, deferred = ctx.product, ctx.deferred
        if deferred is not None:
            weights = ctx.weights
        parts = [local_part(weight) for weight in weights]
        of_inputs = product.of_inputs(gradients[0], parts[0])
        for gradient, part in zip(gradients[1:], parts[1:], strict=True):
            if product is PLAIN:
                # One operation, which neither makes another tensor of the input's size nor reads it.
                of_inputs = torch.addmm(rows(of_inputs), rows(gradient), part).view(of_inputs.shape)
            else:
                of_inputs = of_inputs + product.of_inputs(gradient, part)
        of_weights: list[Tensor | None] = []
        for number, (gradient, weight) in enumerate(zip(gradients, weights, strict=True)):
            if not ctx.needs_input_grad[4 + number]:
                of_weights.append(None)
            elif deferred is None:
                of_weights.append(product.of_weight(gradient, inputs))
            else:
                of_weights.append(deferred.weight_gradient(product, weight, inputs, gradient))
        return of_inputs, None, None, None, *of_weights
