"""Expert parallelism: each rank of a group has some of every block's experts, and tokens are sent to these experts and
back.

The ranks are neighbours on the axes shard, context and tensor, so the expert axis adds no ranks: it is another view of
the same ranks (`Mesh.experts`, docs/decisions/0037). Unlike in GShard (arXiv 2006.16668), no token is dropped.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from titanlab.parallelism.collectives import group_named
from titanlab.parallelism.tensor import on_local_parts
from titanlab.techniques.model.mixture_of_experts import ExpertLinear, MixtureOfExperts
from titanlab.techniques.precision.product import take_over


@torch.library.custom_op("titanlab::exchange", mutates_args=())
def exchange(rows: Tensor, sent: Tensor, received: Tensor, total: int, group: str) -> Tensor:
    """Send consecutive rows to each rank of a group, and receive rows from all ranks, in the order of ranks.

    Args:
        rows: [n, ...].
        sent, received: [k · ranks] int64 on the host: k numbers for each rank, whose sum is the number of rows sent to
            that rank, or received from it.

    Returns:
        the received rows, [total, ...].
    """
    ranks = group_named(group)
    arrived = rows.new_empty((total, *rows.shape[1:]))
    splits = _by_rank(received, total, ranks.size()), _by_rank(sent, rows.shape[0], ranks.size())
    dist.all_to_all_single(arrived, rows.contiguous(), *splits, group=ranks)
    return arrived


@exchange.register_fake
def _(rows: Tensor, sent: Tensor, received: Tensor, total: int, group: str) -> Tensor:
    return rows.new_empty((total, *rows.shape[1:]))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, sent, received, _, ctx.group = inputs
    ctx.rows = rows.shape[0]
    ctx.save_for_backward(sent, received)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
    sent, received = ctx.saved_tensors
    # Gradients go back to the ranks from which rows came.
    return exchange(gradient, received, sent, ctx.rows, ctx.group), None, None, None, None


exchange.register_autograd(_differentiate, setup_context=_keep)


def _by_rank(counts: Tensor, total: int, ranks: int) -> list[int]:
    if isinstance(counts, FakeTensor):
        # A trace of communication runs operators on tensors without data, so counts are unknown: assume equal parts.
        return [total // ranks + (rank < total % ranks) for rank in range(ranks)]
    by_rank: list[int] = counts.view(ranks, -1).sum(1).tolist()
    return by_rank


def spread_experts(model: nn.Module, mesh: DeviceMesh) -> list[nn.Module]:
    """Divide the experts of a model on the meta device among the ranks of a 1-D mesh, in place.

    Returns:
        for each block with experts, the module that has the experts' parameters.

    Raises:
        ConfigError: a technique has changed a layer of the experts.
    """
    experts: list[nn.Module] = []
    for mixture in [module for module in model.modules() if isinstance(module, MixtureOfExperts)]:
        mixture.exchange = TokenExchange(mesh.get_group(), mixture.count)
        experts.append(mixture.experts)
    for path, layer in model.named_modules():
        if isinstance(layer, ExpertLinear):
            take_over(layer, path, key="parallelism.expert", value=mesh.size(), cure="try 1", like=type(layer))
            part = distribute_tensor(layer.weight.data, mesh, [Shard(0)])
            layer.weight = nn.Parameter(part, requires_grad=layer.weight.requires_grad)
            layer.forward = on_local_parts(layer)  # type: ignore[method-assign]
    return experts


class Way(NamedTuple):
    """How `spread` sent and sorted rows; `gather` needs this to send the results back.

    order, inverse: [received] the order that sorts received rows by expert, and its inverse
    sent, received: [experts] int64 on the host: rows sent to each expert; rows received for this rank's experts, by
        rank
    rows: number of rows that were sent
    """

    order: Tensor
    inverse: Tensor
    sent: Tensor
    received: Tensor
    rows: int


class TokenExchange:
    """Sends rows to the ranks that have their experts, and the results back.

    Args:
        group: rank r has experts r · count / ranks to (r + 1) · count / ranks − 1.
    """

    def __init__(self, group: dist.ProcessGroup, count: int) -> None:
        # Keep the group's name, because compiled code cannot have a group as a value.
        self._group: str = group.group_name
        self._ranks, self._own = group.size(), count // group.size()

    def spread(self, rows: Tensor, ends: Tensor) -> tuple[Tensor, Tensor, Way]:
        """This rank's rows by expert → the rows of all ranks for this rank's experts.

        Args:
            rows: [n, dim], sorted by expert.
            ends: [count] int32, end of each expert's rows.

        Returns:
            rows [received, dim], sorted by this rank's experts; their ends; and what `gather` needs.
        """
        counts = ends.diff(prepend=ends.new_zeros(1)).long()
        one_each = torch.ones(self._ranks, dtype=torch.int64, device="cpu")
        theirs = exchange(counts.view(self._ranks, self._own), one_each, one_each, self._ranks, self._group)
        # The host must wait for the counts to allocate the buffers.
        sent, received = torch.stack((counts, theirs.flatten())).cpu().unbind()
        if isinstance(rows, FakeTensor):
            # Tensors without data have no routing: assume that every rank gets as many rows as it sends.
            total = rows.shape[0]
            order = torch.arange(total, device=rows.device)
        else:
            # In compiled code `total` is an unbacked symbol: another count must not recompile the graph.
            total = int(received.sum().item())
            torch._check(total >= 0)
            experts = torch.arange(self._own, device=rows.device).repeat(self._ranks)
            order = experts.repeat_interleave(theirs.flatten(), output_size=total).argsort(stable=True)
        inverse = torch.zeros_like(order).scatter(0, order, torch.arange(total, device=order.device))
        way = Way(order, inverse, sent, received, rows.shape[0])
        arrived = exchange(rows, sent, received, total, self._group)
        by_expert: Tensor = Reorder.apply(arrived, order, inverse)  # type: ignore[no-untyped-call]
        return by_expert, theirs.sum(0).cumsum(0).int(), way

    def gather(self, rows: Tensor, way: Way) -> Tensor:
        """Results for the rows of all ranks → the results of this rank's own rows, in the order of sending."""
        by_rank = Reorder.apply(rows, way.inverse, way.order)  # type: ignore[no-untyped-call]
        own: Tensor = exchange(by_rank, way.received, way.sent, way.rows, self._group)
        return own


class Reorder(torch.autograd.Function):
    """Puts rows in another order; forward and backward are both a gather."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return gradients[0].index_select(0, inverse), None, None
