"""AsyncTP in eager mode: a product and the collective beside it become one operation of symmetric memory.

torch's two operators compute on one rank's piece while another piece is being sent. In compiled blocks inductor finds
the pairs; here the layers say them: those that read the gathered residual stream, and those that sum into it. All four
pairs of a block are fused, forward and backward: the gradient of the input of several layers is one product too.
docs/decisions/0042 has the alternatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

# Imported because it defines the operators.
import torch.distributed._symmetric_memory
from torch import Tensor, nn

from titanlab.costs.fused_layers import FusedLayers
from titanlab.dtensor import local_part
from titanlab.model.projections import Projections
from titanlab.parallelism.joined import JoinedProjections
from titanlab.parallelism.pipeline_weights import DeferredWeights, deferred_of
from titanlab.parallelism.tensor import GATHERED_INSIDE, TensorParallel
from titanlab.precision.product import PLAIN, product_of, rows

symm_mem = torch.ops.symm_mem


def fuse_products(model: nn.Module, layers: FusedLayers, cut: TensorParallel) -> int:
    """Fuse the layers of a model or stage that `cut` has cut, in place; returns how many products were fused.

    Joined layers have to be joined before.
    """
    modules = dict(model.named_modules())
    for path in layers.gathering:
        if path in modules:
            projections, (owner, _, name) = modules[path], path.rpartition(".")
            assert isinstance(projections, Projections), path
            copied = projections.copied if isinstance(projections, JoinedProjections) else None
            setattr(modules[owner], GATHERED_INSIDE, True)
            modules[owner].add_module(name, GatheringProjections(copied, cut))
    for path in layers.scattering:
        if path in modules:
            _scatter_in(modules[path], cut)
    return sum(path in modules for path in (*layers.gathering, *layers.scattering))


class GatheringProjections(Projections):
    """Gathers the residual stream and multiplies each piece with the weights of all layers.

    Args:
        copied: of joined layers, which are one product: whether each output gets its own memory; None: they are not.
        cut: how tensor parallelism has cut the layers.
    """

    def __init__(self, copied: tuple[bool, ...] | None, cut: TensorParallel) -> None:
        super().__init__()
        self.copied, self.cut = copied, cut

    def forward(self, inputs: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
        """This rank's tokens [1, n, dim] → outputs for all tokens, [batch, seq, this rank's part] of each layer."""
        assert all(product_of(layer) is PLAIN for layer in layers), "AsyncTP in eager mode multiplies in 16 or 32 bits"
        assert all(getattr(layer, "bias", None) is None for layer in layers), "its operator adds no bias"
        deferred, weights = _weights(layers)
        outputs: tuple[Tensor, ...] = _GatherProduct.apply(  # type: ignore[no-untyped-call]
            inputs.flatten(0, 1), self.cut.group_name, self.copied, deferred, *weights
        )
        return tuple(self.cut.by_sequence(output) for output in outputs)


def _scatter_in(layer: nn.Module, cut: TensorParallel) -> None:
    """Let a `rowwise` layer scatter inside of its product."""
    assert product_of(layer) is PLAIN, layer

    def forward(part: Tensor) -> Tensor:
        deferred, (weight,) = _weights([layer])
        total: Tensor = _ProductScatter.apply(part, cut.group_name, deferred, weight)  # type: ignore[no-untyped-call]
        if layer.bias is not None:
            total = total + local_part(cast(Tensor, layer.bias))
        return total

    layer.forward = forward


def _weights(layers: Sequence[nn.Module]) -> tuple[DeferredWeights | None, list[Tensor]]:
    """What defers the gradients of layers' weights, and the weights: parameters if it does, else this rank's parts."""
    deferred = deferred_of(layers[0]) if torch.is_grad_enabled() else None
    weights = [cast(Tensor, layer.weight) for layer in layers]
    return deferred, weights if deferred is not None else [local_part(weight) for weight in weights]


def gather_products(part: Tensor, rights: Sequence[Tensor], group: Any) -> tuple[Tensor, list[Tensor]]:
    """All ranks' tokens and their products: [n, in], [in, out] … → [ranks·n, in], [ranks·n, out] …."""
    operator = symm_mem.fused_all_gather_matmul.default
    whole, outputs = operator(part.contiguous(), list(rights), 0, group, return_A=True)
    return whole, outputs


def product_scatter(left: Tensor, right: Tensor, group: Any) -> Tensor:
    """This rank's tokens of the product's sum over ranks: [ranks·n, in], [in, out] → [n, out]."""
    part: Tensor = symm_mem.fused_matmul_reduce_scatter.default(left, right, "sum", 0, group)
    return part


class _GatherProduct(torch.autograd.Function):
    """Forward: gather and multiply; backward: multiply, sum and scatter, and one product for each weight."""

    @staticmethod
    def forward(
        ctx: Any,
        part: Tensor,
        group: Any,
        copied: tuple[bool, ...] | None,
        deferred: DeferredWeights | None,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        parts = [local_part(weight) for weight in weights]
        factors = parts if copied is None else [PLAIN.join(parts)]
        whole, products = gather_products(part, [factor.t() for factor in factors], group)
        _keep(ctx, group, deferred, whole, weights)
        if copied is None:
            return tuple(products)
        outputs = products[0].split([part.shape[0] for part in parts], -1)
        return tuple(output.clone() if copy else output for output, copy in zip(outputs, copied, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        whole, weights = _kept(ctx)
        of_part = None
        if ctx.needs_input_grad[0]:
            joined = PLAIN.join([local_part(weight) for weight in weights])
            of_part = product_scatter(torch.cat(gradients, -1), joined, ctx.group)
        of_weights = (
            _of_weight(ctx, 4 + number, weight, whole, gradient)
            for number, (gradient, weight) in enumerate(zip(gradients, weights, strict=True))
        )
        return of_part, None, None, None, *of_weights


class _ProductScatter(torch.autograd.Function):
    """Forward: multiply, sum and scatter, [batch, seq, in] → [1, n, out]; backward: gather and multiply."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, group: Any, deferred: DeferredWeights | None, weight: Tensor) -> Tensor:
        _keep(ctx, group, deferred, inputs, (weight,))
        return product_scatter(rows(inputs), local_part(weight).t(), group).unsqueeze(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs, (weight,) = _kept(ctx)
        whole, (of_inputs,) = gather_products(gradients[0].squeeze(0), [local_part(weight)], ctx.group)
        return of_inputs.view(inputs.shape), None, None, _of_weight(ctx, 3, weight, inputs, whole)


def _keep(ctx: Any, group: Any, deferred: DeferredWeights | None, inputs: Tensor, weights: Sequence[Tensor]) -> None:
    ctx.group, ctx.deferred = group, deferred
    if deferred is None:
        ctx.save_for_backward(inputs, *weights)
    else:
        # The parameters themselves, because their `grad` is written; saved tensors may be copies.
        ctx.weights = weights
        ctx.save_for_backward(inputs)


def _kept(ctx: Any) -> tuple[Tensor, Sequence[Tensor]]:
    inputs, *weights = ctx.saved_tensors
    return inputs, weights if ctx.deferred is None else ctx.weights


def _of_weight(ctx: Any, argument: int, weight: Tensor, inputs: Tensor, gradient: Tensor) -> Tensor | None:
    """The gradient of a weight; None: it needs none, or it is deferred."""
    if not ctx.needs_input_grad[argument]:
        return None
    if ctx.deferred is None:
        return PLAIN.of_weight(gradient, inputs)
    deferred: DeferredWeights = ctx.deferred
    return deferred.weight_gradient(PLAIN, cast(nn.Parameter, weight), inputs, gradient)
