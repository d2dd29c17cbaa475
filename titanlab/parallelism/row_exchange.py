"""Rows that ranks send to each other, in parts of any size, as an operator with its own backward.

It is a custom operator, in eager mode and in compiled code. The sizes are values of tensors; for torch's functional
all-to-all they would be as many variables of the graph as there are ranks. And activation checkpointing sees one named
operator, whose results it can keep.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

# Private: resolves the group names of functional collectives, the same in torch 2.11 to 2.13. Custom operators cannot
# take a group as an argument.
from torch.distributed.distributed_c10d import _resolve_process_group


@torch.library.custom_op("titanlab::exchange", mutates_args=())
def exchange(rows: Tensor, sent: Tensor, received: Tensor, total: int, group: str) -> Tensor:
    """Send consecutive rows to each rank of a group, and get those of all ranks, in the order of ranks.

    Args:
        rows: [n, ...].
        sent, received: [k · ranks] int64 on the host: k numbers of rows for each rank, whose sum it is sent, and for
            each rank from which rows come.
        total: the sum of `received`.
        group: name of the process group.

    Returns:
        [total, ...].
    """
    ranks = _group(group)
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
    # Gradients go back where rows came from.
    return exchange(gradient, received, sent, ctx.rows, ctx.group), None, None, None, None


exchange.register_autograd(_differentiate, setup_context=_keep)


def _by_rank(counts: Tensor, total: int, ranks: int) -> list[int]:
    if isinstance(counts, FakeTensor):
        # A trace of communication runs the body of operators on tensors without data: then parts are equal.
        return [total // ranks + (rank < total % ranks) for rank in range(ranks)]
    by_rank: list[int] = counts.view(ranks, -1).sum(1).tolist()
    return by_rank


def _group(name: Any) -> dist.ProcessGroup:
    # `Any`, because torch 2.13 has a type for group names and torch 2.11 has none.
    return _resolve_process_group(name)
