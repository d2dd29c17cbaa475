"""Tensor parallelism: the styles that a model's plan names.

Parameters become DTensors, so that all users of a parameter know which part of it they see. Modules exchange plain
local tensors; the autograd functions below communicate in forward and backward. The residual stream is whole on every
rank, [batch, seq, dim]; with sequence parallelism (arXiv 2205.05198) it is this rank's share of all tokens,
[1, batch·seq / ranks, dim]: it is cut along the flattened tokens, so that gather and scatter need no copies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from titanlab.costs import cut_dim, has_partial_gradient, style_of
from titanlab.dtensor import local_part
from titanlab.parallelism.collectives import gather_first, group_named, reduce_scatter
from titanlab.parallelism.pipeline_weights import linear
from titanlab.techniques.model.mixture_of_experts import Router
from titanlab.techniques.precision.product import take_over

_functional = torch.ops._c10d_functional


@dataclass(frozen=True, kw_only=True)
class TensorParallel:
    """How tensor parallelism cuts a model.

    Attributes:
        mesh: 1-D, the ranks of the tensor axis.
        seq_len: tokens per sequence on each of these ranks.
        sequence_parallel: whether the residual stream is cut too.
        loss_parallel: whether logits stay cut over the vocabulary.
    """

    mesh: DeviceMesh
    seq_len: int
    sequence_parallel: bool
    loss_parallel: bool
    # Name and size of the mesh's group. Compiled code would save the mesh itself for the backward of a recomputed
    # block, which torch 2.13 does not support.
    _group: tuple[str, int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_group", (self.mesh.get_group().group_name, self.mesh.size()))

    @property
    def group_name(self) -> Any:
        """Name of the group of the tensor axis; `Any`, because only torch 2.13 has a type for names."""
        return self._group[0]

    def whole(self, stream: Tensor) -> Tensor:
        """All tokens of the residual stream, [batch·seq, dim]; the backward sums the gradients over ranks."""
        gathering = _Gather if self.sequence_parallel else _Copy
        whole: Tensor = gathering.apply(stream.flatten(0, 1), *self._group)  # type: ignore[no-untyped-call]
        return whole

    def by_sequence(self, tokens: Tensor) -> Tensor:
        """[batch·seq, …] → [batch, seq, …]."""
        rows: Tensor = tokens.unflatten(0, (-1, self.seq_len))
        return rows

    def stream(self, summand: Tensor) -> Tensor:
        """The sum of `summand` [batch, seq, dim] over ranks, whole or cut like the residual stream."""
        summing = _SumScatter if self.sequence_parallel else _Sum
        stream: Tensor = summing.apply(summand, *self._group)  # type: ignore[no-untyped-call]
        return stream


Style = Callable[[nn.Module, TensorParallel], None]


def colwise(layer: nn.Module, cut: TensorParallel) -> None:
    """Cut the outputs of a linear layer: all tokens [batch·seq, dim] → [batch, seq, this rank's part]."""
    _distribute(layer, cut.mesh, "colwise")
    layer.forward = lambda tokens: cut.by_sequence(linear(layer, tokens, local_part(layer.bias)))


def rowwise(layer: nn.Module, cut: TensorParallel) -> None:
    """Cut the inputs of a linear layer; its outputs are summed over ranks, and cut along tokens if the stream is."""
    _distribute(layer, cut.mesh, "rowwise")

    def forward(part: Tensor) -> Tensor:
        total: Tensor = cut.stream(linear(layer, part, None))
        if layer.bias is not None:
            total = total + local_part(layer.bias)
        return total

    layer.forward = forward


def gathered(module: nn.Module, cut: TensorParallel) -> None:
    """Gather the first argument of a module that computes on whole sequences, once for all layers inside.

    The argument becomes [batch·seq, dim]. Only `colwise` layers may read it, so that AsyncTP can fuse gather and
    products.
    """

    def gather(owner: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return cut.whole(inputs[0]), *inputs[1:]

    module.register_forward_pre_hook(gather)


def norm(module: nn.Module, cut: TensorParallel, style: str = "norm") -> None:
    """Replicate a module that treats each token alike; every rank applies it to its part of the stream.

    The module's `forward` may use its parameters and plain attributes, as torch's norms do; no methods or submodules.
    """
    _distribute(module, cut.mesh, style)
    module.forward = on_local_parts(module)


def on_local_parts(module: nn.Module) -> Callable[..., Any]:
    """A module's own `forward`, with plain tensors instead of its DTensor parameters."""
    compute = type(module).forward
    settings = {name: value for name, value in vars(module).items() if not name.startswith("_") and name != "forward"}

    def forward(*inputs: Tensor) -> Any:
        local = {name: local_part(parameter) for name, parameter in module.named_parameters(recurse=False)}
        return compute(_Namespace({**settings, **local}), *inputs)

    return forward


def experts(module: nn.Module, cut: TensorParallel) -> None:
    """Gather the first argument of a module, as `gathered` does, and sum its output [batch·seq, dim] into the stream.

    Every rank routes all tokens, and has a part of the width of each expert.
    """
    gathered(module, cut)
    module.register_forward_hook(lambda _, __, output: cut.stream(cut.by_sequence(output)))


def router(module: nn.Module, cut: TensorParallel) -> None:
    """Replicate a router, which all ranks apply to all tokens."""
    assert isinstance(module, Router), module
    _distribute(module, cut.mesh, "router")
    module.forward = lambda tokens: module.choose(tokens, local_part(module.weight))  # type: ignore[method-assign]


def embedding(table: nn.Module, cut: TensorParallel) -> None:
    """Cut an embedding by rows: each rank looks up the tokens whose rows it has."""
    assert isinstance(table, nn.Embedding), table
    # `max_norm` and `padding_idx` of torch's module are not implemented here.
    assert table.max_norm is table.padding_idx is None, table
    first = cut.mesh.get_local_rank() * -(-table.num_embeddings // cut.mesh.size())
    _distribute(table, cut.mesh, "embedding")

    def forward(tokens: Tensor) -> Tensor:
        weight = local_part(table.weight)
        rows = tokens - first
        mine = (rows >= 0) & (rows < weight.shape[0])
        return cut.stream(F.embedding(rows.where(mine, 0), weight) * mine.unsqueeze(-1))

    table.forward = forward  # type: ignore[assignment, method-assign]


def head(module: nn.Module, cut: TensorParallel) -> None:
    """Cut the last linear layer over the vocabulary; a tied head gets the embedding's table, which is cut alike."""
    _distribute(module, cut.mesh, "head")

    def forward(stream: Tensor, table: Any = None) -> Tensor:
        weight: Any = module.weight if table is None else table
        tokens, bias = cut.by_sequence(cut.whole(stream)), local_part(getattr(module, "bias", None))
        logits = linear(module, tokens, bias) if table is None else F.linear(tokens, local_part(weight), bias)
        if cut.loss_parallel:
            return logits
        shape = torch.Size((*logits.shape[:-1], weight.shape[0]))
        strides = (shape[1] * shape[2], shape[2], 1)
        # Gather with DTensor, because the parts may be uneven.
        parts = DTensor.from_local(logits, cut.mesh, [Shard(2)], run_check=False, shape=shape, stride=strides)
        whole: Tensor = parts.redistribute(placements=[Replicate()]).to_local()
        return whole

    module.forward = forward


STYLES: Mapping[str, Style] = {
    "colwise": colwise,
    "rowwise": rowwise,
    "gathered": gathered,
    "norm": norm,
    # Heads are not split: each rank normalises its own heads.
    "head_norm": norm,
    "experts": experts,
    "router": router,
    "expert_colwise": functools.partial(norm, style="expert_colwise"),
    "expert_rowwise": functools.partial(norm, style="expert_rowwise"),
    # Expert parallelism divides these parameters: see `titanlab.parallelism.expert`.
    "expert_stack": lambda module, cut: None,
    "embedding": embedding,
    "head": head,
}

# Styles that replace a module's `forward`, with the class whose forward they compute; None: the module's own class.
_TAKEN: Mapping[str, type[nn.Module] | None] = {
    **dict.fromkeys(("colwise", "rowwise", "head"), nn.Linear),
    "embedding": nn.Embedding,
    "router": Router,
    **dict.fromkeys(("norm", "head_norm", "expert_colwise", "expert_rowwise")),
}


def parallelise(
    model: nn.Module, plan: Mapping[str, str], cut: TensorParallel, styles: Mapping[str, Style] = STYLES
) -> frozenset[str]:
    """Cut the modules of a model or stage on the meta device, in place.

    Args:
        plan: path of a module → name of its style; `*` matches one step of a path.

    Returns:
        names of the parameters that each rank has whole but applies only to its share of the tokens or heads. After
        the backward each rank has only a partial gradient of them; the caller must sum these gradients over ranks, in
        one reduction for all.

    Raises:
        ConfigError: a module computes something else than its style.
        ValueError: the plan names an unknown style.
    """
    unknown = sorted(set(plan.values()) - set(styles))
    if unknown:
        raise ValueError(f"the tensor plan names {', '.join(unknown)}; known: {', '.join(styles)}")
    for name, module in list(model.named_modules()):
        style = style_of(plan, name)
        if style and style in _TAKEN:
            like = _TAKEN[style] or type(module)
            take_over(module, name, key="parallelism.tensor", value=cut.mesh.size(), cure="try 1", like=like)
        if style:
            styles[style](module, cut)
    whole = (Replicate(),)
    return frozenset(
        name
        for name, p in model.named_parameters()
        if isinstance(p, DTensor)
        and p.placements == whole
        and has_partial_gradient(plan, name, sequence_parallel=cut.sequence_parallel)
    )


def _distribute(module: nn.Module, mesh: DeviceMesh, style: str) -> None:
    """Make a module's own parameters DTensors, cut along the dim that `cut_dim` gives for the style."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        dim = cut_dim(style, parameter.ndim)
        part = distribute_tensor(parameter.data, mesh, [Replicate() if dim is None else Shard(dim)])
        module.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))


class _Namespace:
    """An object with the given attributes; torch.compile can trace its constructor."""

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        for name, value in attributes.items():
            setattr(self, name, value)


# torch.compile traces functional collectives and fuses them with products for AsyncTP. Eager code calls faster ones.
# Groups are passed by name, as `Any`, because only torch 2.13 has a type for names.


def _waited(pending: Tensor) -> Tensor:
    tensor: Tensor = _functional.wait_tensor(pending)
    return tensor


def _gathered(part: Tensor, group: Any, size: int) -> Tensor:
    if torch.compiler.is_compiling():
        return _waited(_functional.all_gather_into_tensor(part.contiguous(), size, group))
    return gather_first(part, group_named(group))


def _scattered(summand: Tensor, group: Any, size: int) -> Tensor:
    if torch.compiler.is_compiling():
        return _waited(_functional.reduce_scatter_tensor(summand.contiguous(), "sum", size, group))
    part = summand.new_empty((summand.shape[0] // size, *summand.shape[1:]))
    reduce_scatter(part, summand.contiguous(), group_named(group))
    return part


def _summed(summand: Tensor, group: Any) -> Tensor:
    if torch.compiler.is_compiling():
        return _waited(_functional.all_reduce(summand.contiguous(), "sum", group))
    total = summand.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group_named(group))
    return total


class _Copy(torch.autograd.Function):
    """Forward: identity; backward: sum over ranks."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: Any, size: int) -> Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _summed(gradients[0], ctx.group), None, None


class _Sum(torch.autograd.Function):
    """Forward: sum over ranks; backward: identity."""

    @staticmethod
    def forward(ctx: Any, summand: Tensor, group: Any, size: int) -> Tensor:
        return _summed(summand, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0], None, None


class _Gather(torch.autograd.Function):
    """Forward: this rank's tokens [n, dim] → all tokens; backward: this rank's part of the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any, size: int) -> Tensor:
        ctx.group, ctx.size = group, size
        return _gathered(part, group, size)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _scattered(gradients[0], ctx.group, ctx.size), None, None


class _SumScatter(torch.autograd.Function):
    """Forward: [batch, seq, dim] → this rank's tokens of the sum, [1, n, dim]; backward: gradients of all tokens."""

    @staticmethod
    def forward(ctx: Any, summand: Tensor, group: Any, size: int) -> Tensor:
        ctx.group, ctx.size, ctx.shape = group, size, summand.shape
        return _scattered(summand.flatten(0, 1), group, size).unsqueeze(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _gathered(gradients[0].squeeze(0), ctx.group, ctx.size).view(ctx.shape), None, None
