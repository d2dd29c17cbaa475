"""Work on whole matrices of which ranks hold parts: each rank is given some of them, and everyone its parts back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard


@dataclass(frozen=True, kw_only=True)
class _Cut:
    """How one axis of a mesh cuts a matrix, or what axes that cut earlier have left of it.

    Attributes:
        dim: that is cut.
        lengths: of the parts along it, by rank.
        group: the ranks that have them.
    """

    dim: int
    lengths: tuple[int, ...]
    group: dist.ProcessGroup


def sharers(matrix: Tensor) -> int:
    """Number of ranks among which `changed` shares out matrices that are cut as this one is."""
    cuts = _cuts(matrix)
    return len(cuts[-1].lengths) if cuts else 1


def changed(matrices: Sequence[Tensor], change: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """What this rank holds of `change(matrix)` for each of some matrices.

    The ranks of one axis take one matrix each: they send it the others' parts and get theirs of the result, so that no
    matrix is computed twice on that axis, and none is sent to who does not need it.

    Args:
        matrices: up to `sharers` of them, of one shape, dtype and cut; plain, or DTensors without partial sums.
        change: of a plain matrix to another of its shape and dtype.
    """
    first, cuts = matrices[0], _cuts(matrices[0])
    locals_ = [matrix.to_local() if isinstance(matrix, DTensor) else matrix for matrix in matrices]
    if not cuts:
        return [change(local) for local in locals_]
    assert isinstance(first, DTensor)
    home = locals_[0].device
    # An offloaded parameter rests where the ranks' collectives do not reach.
    locals_ = [local.to(first.device_mesh.device_type) for local in locals_]
    inner, outer = cuts[-1], cuts[:-1]
    whole = _to_owner(locals_, inner)
    if inner.group.rank() < len(matrices):
        for cut in reversed(outer):
            whole = _joined(whole, cut)
        whole = change(whole)
        for cut in outer:
            whole = whole.split(cut.lengths, cut.dim)[cut.group.rank()]
    return [part.to(home) for part in _from_owner(whole, inner, len(matrices))]


def _cuts(matrix: Tensor) -> list[_Cut]:
    """The cuts of a matrix in the order in which they were made, copies left out.

    FSDP2 cuts again what tensor parallelism has cut, and says so by a stride, though its axis comes first in the mesh.
    Where that makes no difference FSDP2's comes last too: it is the longest axis.
    """
    if not isinstance(matrix, DTensor):
        return []
    mesh, shape, placements = matrix.device_mesh, list(matrix.shape), matrix.placements
    axes = [axis for axis, placement in enumerate(placements) if not placement.is_replicate()]
    dims = [placements[axis].dim for axis in axes]  # type: ignore[attr-defined]
    if len(set(dims)) == len(dims) or any(isinstance(each, _StridedShard) for each in placements):
        axes.reverse()
    cuts = []
    for axis in axes:
        dim, parts = placements[axis].dim, mesh.size(axis)  # type: ignore[attr-defined]
        # As DTensor cuts: equal parts, rounded up, and what is left.
        part = -(-shape[dim] // parts)
        lengths = tuple(max(0, min(part, shape[dim] - part * index)) for index in range(parts))
        shape[dim] = lengths[mesh.get_local_rank(axis)]
        cuts.append(_Cut(dim=dim, lengths=lengths, group=mesh.get_group(axis)))
    return cuts


def _to_owner(locals_: Sequence[Tensor], cut: _Cut) -> Tensor:
    """Rank r's parts of matrix r, put together; zeros on a rank for which there is none."""
    sent = _buffer(locals_[0], cut)
    for place, local in zip(sent, locals_, strict=False):
        place.narrow(cut.dim, 0, local.shape[cut.dim]).copy_(local)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=cut.group)
    parts = [part.narrow(cut.dim, 0, length) for part, length in zip(received, cut.lengths, strict=True)]
    return torch.cat(parts, cut.dim)


def _from_owner(whole: Tensor, cut: _Cut, count: int) -> list[Tensor]:
    """This rank's part of each of `count` matrices, of which rank r has matrix r."""
    sent = _buffer(whole, cut)
    for place, part in zip(sent, whole.split(cut.lengths, cut.dim), strict=True):
        place.narrow(cut.dim, 0, part.shape[cut.dim]).copy_(part)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=cut.group)
    return [part.narrow(cut.dim, 0, cut.lengths[cut.group.rank()]) for part in received[:count]]


def _buffer(like: Tensor, cut: _Cut) -> Tensor:
    """Zeros for one part a rank, each as long as the longest: [ranks, rows, columns]."""
    shape = list(like.shape)
    shape[cut.dim] = max(cut.lengths)
    return like.new_zeros((len(cut.lengths), *shape))


def _joined(local: Tensor, cut: _Cut) -> Tensor:
    """The parts of a group's ranks, one after another."""
    shape = list(local.shape)
    shape[cut.dim] = max(cut.lengths)
    sent = local.new_zeros(shape)
    sent.narrow(cut.dim, 0, local.shape[cut.dim]).copy_(local)
    parts = [torch.empty_like(sent) for _ in cut.lengths]
    dist.all_gather(parts, sent, group=cut.group)
    return torch.cat([part.narrow(cut.dim, 0, n) for part, n in zip(parts, cut.lengths, strict=True)], cut.dim)
