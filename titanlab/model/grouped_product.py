"""A product of rows with one matrix for each group of rows, as an operator with its own backward.

It calls `torch.nn.functional.grouped_mm`. It is a custom operator because torch 2.13 traces that function (for
compilation and for tensors without data) only in bfloat16, and because its gradients need strides that the function
accepts. It can be called directly when `torch._meta_registrations` has all dtypes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

# Rows of operands must begin at multiples of so many bytes.
_ALIGNMENT = 16
_grouped_mm: Callable[..., Tensor] = getattr(F, "grouped_mm", None) or torch._grouped_mm


@torch.library.custom_op("titanlab::grouped_product", mutates_args=())
def grouped_product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """The product rows · weight[g]ᵀ for the rows of each group g.

    Args:
        rows: [n, in], sorted by group.
        weight: [groups, out, in].
        ends: [groups] int32: number of rows in this and all earlier groups; the last one is n. Groups may be empty.

    Returns:
        [n, out].
    """
    out = weight.shape[1]
    if not rows.shape[0]:
        return rows.new_empty((0, out))
    product = _multiply(_aligned(rows), _aligned_rows(_aligned(weight)).transpose(1, 2), ends)
    return _first(product, out)


@torch.library.custom_op("titanlab::grouped_product_of_inputs", mutates_args=())
def of_inputs(gradient: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """The gradient of `rows`: [n, out] → [n, in]."""
    width = weight.shape[2]
    if not gradient.shape[0]:
        return gradient.new_empty((0, width))
    product = _multiply(_aligned(gradient), _aligned_rows(_aligned(weight)), ends)
    return _first(product, width)


@torch.library.custom_op("titanlab::grouped_product_of_weight", mutates_args=())
def of_weight(gradient: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    """The gradient of `weight`: [groups, out, in]."""
    out, width = gradient.shape[1], rows.shape[1]
    if not rows.shape[0]:
        return rows.new_zeros((ends.shape[0], out, width))
    product = _multiply(_aligned(gradient).t(), _aligned(rows), ends)
    return product[:, :out, :width].contiguous()


@grouped_product.register_fake
def _(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty((rows.shape[0], weight.shape[1]))


@of_inputs.register_fake
def _(gradient: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return gradient.new_empty((gradient.shape[0], weight.shape[2]))


@of_weight.register_fake
def _(gradient: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty((ends.shape[0], gradient.shape[1], rows.shape[1]))


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    rows, weight, ends = ctx.saved_tensors
    return (
        of_inputs(gradient, weight, ends) if ctx.needs_input_grad[0] else None,
        of_weight(gradient, rows, ends) if ctx.needs_input_grad[1] else None,
        None,
    )


grouped_product.register_autograd(_differentiate, setup_context=_keep)


@register_flop_formula(torch.ops.titanlab.grouped_product)
def _(rows: tuple[int, ...], weight: tuple[int, ...], *_: Any, **__: Any) -> int:
    return 2 * rows[0] * weight[1] * weight[2]


@register_flop_formula(torch.ops.titanlab.grouped_product_of_inputs)
def _(gradient: tuple[int, ...], weight: tuple[int, ...], *_: Any, **__: Any) -> int:
    return 2 * gradient[0] * weight[1] * weight[2]


@register_flop_formula(torch.ops.titanlab.grouped_product_of_weight)
def _(gradient: tuple[int, ...], rows: tuple[int, ...], *_: Any, **__: Any) -> int:
    return 2 * gradient[0] * gradient[1] * rows[1]


def _multiply(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    if type(left) is not Tensor and isinstance(left, FakeTensor):
        # A trace of communication runs the body of operators on tensors without data.
        groups = () if right.ndim == 3 else (ends.shape[0],)
        return left.new_empty((*groups, left.shape[0], right.shape[-1]))
    return _grouped_mm(left, right, offs=ends)


def _aligned(operand: Tensor) -> Tensor:
    """Contiguous, with zeros at the end of each row until its size is a multiple of the alignment.

    Zeros that are added to the inner dim of a product do not change it. A gradient may be a view with strides of 0.
    """
    unit = _ALIGNMENT // operand.element_size()
    missing = -operand.shape[-1] % unit
    return F.pad(operand, (0, missing)) if missing else operand.contiguous()


def _aligned_rows(weight: Tensor) -> Tensor:
    """The same for the number of rows, which become rows of the other operand or of the result."""
    missing = -weight.shape[1] % (_ALIGNMENT // weight.element_size())
    return F.pad(weight, (0, 0, 0, missing)) if missing else weight


def _first(product: Tensor, columns: int) -> Tensor:
    return product if product.shape[1] == columns else product[:, :columns].contiguous()
