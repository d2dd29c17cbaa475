"""Collectives along the first dim, with the function names of the installed torch and a fast reduce-scatter on gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

# A private function, the same in torch 2.11 to 2.13: functional collectives find the group of a name with it.
from torch.distributed.distributed_c10d import _resolve_process_group

# torch 2.13 has the names on the left and deprecates those on the right; torch 2.11 has only those on the right.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

STANDS_FOR_NCCL = "fake_nccl"
"""Backend of a process group on CPU that sends nothing, but has NCCL's collectives; see `titanlab.prove.rank_trace`."""


def group_named(name: Any) -> dist.ProcessGroup:
    """The process group with this name: custom operators and compiled code cannot take a group as an argument."""
    # `Any`, because torch 2.13 has a type for group names and torch 2.11 has none.
    return _resolve_process_group(name)


def gather_first(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The concatenated parts of all ranks: [n, …] → [ranks·n, …]."""
    whole = part.new_empty((group.size() * part.shape[0], *part.shape[1:]))
    all_gather_single(whole, part.contiguous(), group=group)
    return whole


def reduce_scatter(output: torch.Tensor, summand: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Write this rank's part of the sum over ranks to `output`. Both tensors are contiguous.

    gloo's reduce-scatter is an all-reduce with twice the traffic, so on CPU ranks exchange parts and add them.
    """
    if summand.device.type != "cpu" or dist.get_backend(group) == STANDS_FOR_NCCL:
        reduce_scatter_single(output, summand, group=group)
        return
    parts = torch.empty_like(summand)
    dist.all_to_all_single(parts, summand, group=group)
    torch.sum(parts.view(group.size(), *output.shape), dim=0, out=output)
