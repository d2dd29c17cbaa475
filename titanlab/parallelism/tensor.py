"""Tensor parallelism: the styles that a model's plan names.

Parameters become DTensors, so that everything that looks at a parameter knows which part it sees; what flows between
modules are plain local tensors, for which three operators below say what is sent, forward and backward. The residual
stream is whole on every rank, [batch, seq, dim]; with sequence parallelism (arXiv 2205.05198) it is this rank's share
of all tokens, [1, batch·seq / ranks, dim]: cut along the flattened tokens, gathering and scattering need no copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

# Private, but what functional collectives name groups by, in torch 2.11 as in 2.13.
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from titanlab.costs.account import style_of
from titanlab.costs.tensor_styles import cut_dim
from titanlab.parallelism.collectives import gather_first, sum_all, sum_and_scatter_first
from titanlab.parallelism.local import local_part
from titanlab.parallelism.pipeline_weights import linear as linear_product
from titanlab.precision.product import ATTRIBUTE

_functional = torch.ops._c10d_functional
# (layer, inputs, bias) → inputs · weightᵀ + bias, with what this rank has of the layer's weight.
Product = Callable[[nn.Module, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True, kw_only=True)
class TensorParallel:
    """How tensor parallelism cuts a model.

    Attributes:
        mesh: 1-D, the ranks of the tensor axis.
        seq_len: tokens of a sequence that each of these ranks has.
        sequence_parallel: the residual stream is shared out, too.
        loss_parallel: logits stay cut over the vocabulary.
        products: by style, how a precision multiplies in layers that it has replaced.
    """

    mesh: DeviceMesh
    seq_len: int
    sequence_parallel: bool
    loss_parallel: bool
    products: Mapping[str, Product] = field(default_factory=dict)
    # Name and size of the mesh's group. The mesh itself, as a part of a block that is computed again, would be saved
    # for the backward in compiled code, which torch 2.13 cannot.
    _group: tuple[str, int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_group", (self.mesh.get_group().group_name, self.mesh.size()))

    def product(self, style: str, layer: nn.Module) -> Product:
        """How a layer multiplies: the precision's way, unless it has left the layer as it was or says it in halves."""
        halves = type(layer) is nn.Linear or hasattr(layer, ATTRIBUTE)
        return linear_product if halves else self.products.get(style, linear_product)

    def whole(self, stream: Tensor) -> Tensor:
        """The residual stream as all ranks need it: all tokens, [batch·seq, dim]. Gradients that return are summed."""
        gathering = _Gather if self.sequence_parallel else _Copy
        whole: Tensor = gathering.apply(stream.flatten(0, 1), *self._group)  # type: ignore[no-untyped-call]
        return whole

    def by_sequence(self, tokens: Tensor) -> Tensor:
        """[batch·seq, …] → [batch, seq, …]."""
        rows: Tensor = tokens.unflatten(0, (-1, self.seq_len))
        return rows

    def stream(self, summand: Tensor) -> Tensor:
        """The sum of all ranks' [batch, seq, dim] as the residual stream has it."""
        summing = _SumScatter if self.sequence_parallel else _Sum
        stream: Tensor = summing.apply(summand, *self._group)  # type: ignore[no-untyped-call]
        return stream


Style = Callable[[nn.Module, TensorParallel], None]


def colwise(linear: nn.Module, cut: TensorParallel) -> None:
    """A linear layer whose outputs are cut; of all tokens [batch·seq, dim] it makes [batch, seq, its part]."""
    _distribute(linear, cut.mesh, "colwise")
    product = cut.product("colwise", linear)
    linear.forward = lambda tokens: cut.by_sequence(product(linear, tokens, local_part(linear.bias)))


def rowwise(linear: nn.Module, cut: TensorParallel) -> None:
    """A linear layer whose inputs are cut; it gives the residual stream."""
    _distribute(linear, cut.mesh, "rowwise")
    product = cut.product("rowwise", linear)

    def forward(part: Tensor) -> Tensor:
        total: Tensor = cut.stream(product(linear, part, None))
        if linear.bias is not None:
            total = total + local_part(linear.bias)
        return total

    linear.forward = forward


def gathered(module: nn.Module, cut: TensorParallel) -> None:
    """A module that computes on whole sequences: its first argument becomes all tokens, once for all products inside.

    As [batch·seq, dim], which only its `colwise` layers look at: so gathering and products can be one (AsyncTP).
    """
    module.register_forward_pre_hook(lambda _, inputs: (cut.whole(inputs[0]), *inputs[1:]))


def norm(module: nn.Module, cut: TensorParallel) -> None:
    """A module that treats each token alike: every rank has all of its parameters, and its part of the stream.

    Its `forward` may use parameters and plain attributes of its own, as torch's norms do; no methods, no modules.
    """
    _distribute(module, cut.mesh, "norm")
    compute = type(module).forward
    settings = {name: value for name, value in vars(module).items() if not name.startswith("_") and name != "forward"}

    def forward(stream: Tensor) -> Tensor:
        # The module's own code, with plain tensors in the place of its parameters.
        local = {name: local_part(parameter) for name, parameter in module.named_parameters(recurse=False)}
        output: Tensor = compute(_StandIn({**settings, **local}), stream)
        return output

    module.forward = forward


def embedding(table: nn.Module, cut: TensorParallel) -> None:
    """A table cut by rows: each rank looks up what it has."""
    assert isinstance(table, nn.Embedding), table
    # These features of torch's module are not implemented here.
    assert table.max_norm is None, table
    assert table.padding_idx is None, table
    first = cut.mesh.get_local_rank() * -(-table.num_embeddings // cut.mesh.size())
    _distribute(table, cut.mesh, "embedding")

    def forward(tokens: Tensor) -> Tensor:
        weight = local_part(table.weight)
        rows = tokens - first
        mine = (rows >= 0) & (rows < weight.shape[0])
        return cut.stream(F.embedding(rows.where(mine, 0), weight) * mine.unsqueeze(-1))

    table.forward = forward  # type: ignore[assignment, method-assign]


def head(module: nn.Module, cut: TensorParallel) -> None:
    """The last product, cut over the vocabulary; or one that is handed the embedding's table, which is cut alike."""
    _distribute(module, cut.mesh, "head")
    product = cut.product("head", module)

    def forward(stream: Tensor, table: Any = None) -> Tensor:
        weight: Any = module.weight if table is None else table
        tokens, bias = cut.by_sequence(cut.whole(stream)), local_part(getattr(module, "bias", None))
        logits = product(module, tokens, bias) if table is None else F.linear(tokens, local_part(weight), bias)
        if cut.loss_parallel:
            return logits
        shape = torch.Size((*logits.shape[:-1], weight.shape[0]))
        strides = (shape[1] * shape[2], shape[2], 1)
        # Parts may be uneven: DTensor knows how to gather those.
        parts = DTensor.from_local(logits, cut.mesh, [Shard(2)], run_check=False, shape=shape, stride=strides)
        whole: Tensor = parts.redistribute(placements=[Replicate()]).to_local()
        return whole

    module.forward = forward


STYLES: Mapping[str, Style] = {
    "colwise": colwise,
    "rowwise": rowwise,
    "gathered": gathered,
    "norm": norm,
    "embedding": embedding,
    "head": head,
}


def parallelise(
    model: nn.Module, plan: Mapping[str, str], cut: TensorParallel, styles: Mapping[str, Style] = STYLES
) -> frozenset[str]:
    """Cut the modules of a model on meta, or of a stage of it, in place.

    Args:
        plan: path of a module → name of its style; `*` stands for one step of a path.

    Returns:
        names of the parameters whose gradients are summands, one on every rank, when the backward is over: of whole
        parameters that act on shares of the tokens. They are left to the caller, who can sum them all at once.

    Raises:
        ValueError: the plan names a style that there is not.
    """
    unknown = sorted(set(plan.values()) - set(styles))
    if unknown:
        raise ValueError(f"the tensor plan names {', '.join(unknown)}; there is {', '.join(styles)}")
    for name, module in list(model.named_modules()):
        style = style_of(plan, name)
        if style:
            styles[style](module, cut)
    if not cut.sequence_parallel:
        return frozenset()
    whole = (Replicate(),)
    return frozenset(name for name, p in model.named_parameters() if isinstance(p, DTensor) and p.placements == whole)


def _distribute(module: nn.Module, mesh: DeviceMesh, style: str) -> None:
    """Make a module's own parameters DTensors, cut as `titanlab.costs.tensor_styles` says of the style."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        dim = cut_dim(style, parameter.ndim)
        part = distribute_tensor(parameter.data, mesh, [Replicate() if dim is None else Shard(dim)])
        module.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))


class _StandIn:
    """An object with the given attributes, made in a way that compilers can follow."""

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        for name, value in attributes.items():
            setattr(self, name, value)


# Compilers know functional collectives, and fuse them with products for AsyncTP; eager mode has faster ones. Groups go
# by their names, for which torch 2.13 has a type of its own.


def _gathered(part: Tensor, group: Any, size: int) -> Tensor:
    if torch.compiler.is_compiling():
        whole: Tensor = _functional.wait_tensor(_functional.all_gather_into_tensor(part.contiguous(), size, group))
        return whole
    return gather_first(part, _resolve_process_group(group))


def _scattered(summand: Tensor, group: Any, size: int) -> Tensor:
    if torch.compiler.is_compiling():
        part: Tensor = _functional.wait_tensor(
            _functional.reduce_scatter_tensor(summand.contiguous(), "sum", size, group)
        )
        return part
    return sum_and_scatter_first(summand, _resolve_process_group(group))


def _summed(summand: Tensor, group: Any) -> Tensor:
    if torch.compiler.is_compiling():
        total: Tensor = _functional.wait_tensor(_functional.all_reduce(summand.contiguous(), "sum", group))
        return total
    return sum_all(summand, _resolve_process_group(group))


class _Copy(torch.autograd.Function):
    """Forward nothing, backward the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: Any, size: int) -> Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _summed(gradients[0], ctx.group), None, None


class _Sum(torch.autograd.Function):
    """Forward the sum over ranks, backward nothing."""

    @staticmethod
    def forward(ctx: Any, summand: Tensor, group: Any, size: int) -> Tensor:
        return _summed(summand, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0], None, None


class _Gather(torch.autograd.Function):
    """This rank's tokens [n, dim] → all of them; backward its part of the sum."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any, size: int) -> Tensor:
        ctx.group, ctx.size = group, size
        return _gathered(part, group, size)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _scattered(gradients[0], ctx.group, ctx.size), None, None


class _SumScatter(torch.autograd.Function):
    """[batch, seq, dim] → this rank's tokens of the sum, [1, n, dim]; backward the gradients of all tokens."""

    @staticmethod
    def forward(ctx: Any, summand: Tensor, group: Any, size: int) -> Tensor:
        ctx.group, ctx.size, ctx.shape = group, size, summand.shape
        return _scattered(summand.flatten(0, 1), group, size).unsqueeze(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _gathered(gradients[0].squeeze(0), ctx.group, ctx.size).view(ctx.shape), None, None
