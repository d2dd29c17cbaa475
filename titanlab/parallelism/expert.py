"""Expert parallelism: each rank of a group has some of every block's experts, and tokens travel to them and back.

The ranks are neighbours on the axes shard, context and tensor, so the axis multiplies nothing: it is another view of
the same ranks (`Mesh.experts`). A rank sends each of its tokens' rows to the ranks that have their experts (GShard,
arXiv 2006.16668); no row is dropped, so the sizes of messages are known only when the router has chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from titanlab.model.grouped_product import grouped_product
from titanlab.model.mixture_of_experts import ExpertLinear, MixtureOfExperts
from titanlab.parallelism.local import local_part


def spread_experts(model: nn.Module, mesh: DeviceMesh) -> list[nn.Module]:
    """Divide the experts of a model on the meta device among the ranks of a 1-D mesh, in place.

    Returns:
        by block, the module with the parameters of its experts.
    """
    found: list[nn.Module] = []
    for mixture in [module for module in model.modules() if isinstance(module, MixtureOfExperts)]:
        mixture.exchange = TokenExchange(mesh.get_group(), mixture.count)
        for layer in [module for module in mixture.experts.modules() if isinstance(module, ExpertLinear)]:
            _distribute(layer, mesh)
        found.append(mixture.experts)
    return found


def _distribute(layer: ExpertLinear, mesh: DeviceMesh) -> None:
    part = distribute_tensor(layer.weight.data, mesh, [Shard(0)])
    layer.weight = nn.Parameter(part, requires_grad=layer.weight.requires_grad)
    layer.forward = lambda rows, ends: grouped_product(rows, local_part(layer.weight), ends)  # type: ignore[method-assign]


class Way(NamedTuple):
    """How rows have travelled.

    order, inverse: [received] their order by expert among the received rows, and the inverse
    sent, received: rows by rank
    """

    order: Tensor
    inverse: Tensor
    sent: Sequence[int]
    received: Sequence[int]


class TokenExchange:
    """Sends rows to the ranks that have their experts, and the results back.

    Args:
        group: rank r has experts r · count / ranks to (r + 1) · count / ranks − 1.
        count: of experts.
    """

    def __init__(self, group: dist.ProcessGroup, count: int) -> None:
        self._group, self._own = group, count // group.size()

    def spread(self, rows: Tensor, ends: Tensor) -> tuple[Tensor, Tensor, Way]:
        """This rank's rows by expert → the rows of all ranks for this rank's experts.

        Args:
            rows: [n, dim], sorted by expert.
            ends: [count] int32, end of each expert's rows.

        Returns:
            rows [received, dim], sorted by this rank's experts; their ends; and what `gather` needs.
        """
        ranks = self._group.size()
        counts = ends.diff(prepend=ends.new_zeros(1)).long()
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self._group)
        by_rank = torch.stack((counts, theirs)).view(2, ranks, self._own)
        if isinstance(rows, FakeTensor):
            # Without data nothing is known of the choice: every rank gets as many rows as it sends.
            sent = received = [rows.shape[0] // ranks + (rank < rows.shape[0] % ranks) for rank in range(ranks)]
            order = torch.arange(rows.shape[0], device=rows.device)
        else:
            # The host has to wait for the counts: it makes the buffers.
            sent, received = by_rank.sum(2).tolist()
            experts = torch.arange(self._own, device=rows.device).repeat(ranks)
            order = experts.repeat_interleave(theirs).argsort(stable=True)
        inverse = torch.zeros_like(order).scatter(0, order, torch.arange(order.shape[0], device=order.device))
        way = Way(order, inverse, sent, received)
        arrived = Exchange.apply(rows, sent, received, self._group)  # type: ignore[no-untyped-call]
        by_expert: Tensor = Reorder.apply(arrived, order, inverse)  # type: ignore[no-untyped-call]
        return by_expert, by_rank[1].sum(0).cumsum(0).int(), way

    def gather(self, rows: Tensor, way: Way) -> Tensor:
        """The results of all ranks for their rows → those of this rank's rows, in the order in which it sent them."""
        by_rank = Reorder.apply(rows, way.inverse, way.order)  # type: ignore[no-untyped-call]
        own: Tensor = Exchange.apply(by_rank, way.received, way.sent, self._group)  # type: ignore[no-untyped-call]
        return own


class Exchange(torch.autograd.Function):
    """Forward: sends sent[r] rows to each rank r and receives received[r]; backward: the reverse."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchanged(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(gradients[0], ctx.received, ctx.sent, ctx.group), None, None, None


class Reorder(torch.autograd.Function):
    """Rows in another order; a gather in forward and backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return gradients[0].index_select(0, inverse), None, None


def _exchanged(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    arrived = rows.new_empty((sum(received), rows.shape[1]))
    dist.all_to_all_single(arrived, rows.contiguous(), list(received), list(sent), group=group)
    return arrived
