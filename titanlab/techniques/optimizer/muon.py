"""optimizer=muon: torch's Muon for the matrices of blocks, which ranks gather whole, and torch's AdamW for the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import _muon as torch_muon

from titanlab.dtensor import local_part
from titanlab.techniques.optimizer.adamw import fused_adamw
from titanlab.techniques.optimizer.optimizers_schema import Muon


@dataclass(frozen=True, kw_only=True)
class _Sharding:
    """How one axis of a mesh shards a matrix, or the part of it that earlier axes left to this rank.

    Attributes:
        lengths: lengths of the parts along `dim`, by rank.
    """

    dim: int
    lengths: tuple[int, ...]
    group: dist.ProcessGroup


def sharing_ranks(matrix: Tensor) -> int:
    """Number of ranks over which `map_whole` distributes matrices with this matrix's sharding."""
    shardings = _shardings(matrix)
    return len(shardings[-1].lengths) if shardings else 1


def map_whole(matrices: Sequence[Tensor], function: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """This rank's parts of `function(matrix)`, for each matrix.

    Each rank of one mesh axis gathers one of the matrices, computes, and sends the other ranks their parts of the
    result: on that axis no matrix is computed twice, or sent to a rank that does not need it.

    Args:
        matrices: at most `sharing_ranks` of them, of one shape, dtype and sharding; plain, or DTensors without partial
            sums.
        function: from a plain matrix to another of the same shape and dtype.
    """
    first, shardings = matrices[0], _shardings(matrices[0])
    locals_ = [local_part(matrix) for matrix in matrices]
    if not shardings:
        return [function(local) for local in locals_]
    assert isinstance(first, DTensor)
    device = locals_[0].device
    # Collectives need tensors on the mesh's device, but offloaded parameters are on the CPU.
    locals_ = [local.to(first.device_mesh.device_type) for local in locals_]
    inner, outer = shardings[-1], shardings[:-1]
    # Matrix r goes to rank r; a rank without a matrix has zeros.
    whole = _joined(_exchanged(locals_, inner), inner)
    if inner.group.rank() < len(matrices):
        for sharding in reversed(outer):
            whole = _gathered(whole, sharding)
        whole = function(whole)
        for sharding in outer:
            whole = torch.split(whole, list(sharding.lengths), sharding.dim)[sharding.group.rank()]
    own = inner.lengths[inner.group.rank()]
    received = _exchanged(torch.split(whole, list(inner.lengths), inner.dim), inner)
    return [part.narrow(inner.dim, 0, own).to(device) for part in received[: len(matrices)]]


def _shardings(matrix: Tensor) -> list[_Sharding]:
    """The shardings of a matrix in the order in which they were applied, without axes that replicate it.

    FSDP2 shards after tensor parallelism, although its axis comes first in the mesh; if both shard the same dim, the
    placement is strided. If they shard different dims, the order is free: FSDP2 comes last, because it has most ranks.
    """
    if not isinstance(matrix, DTensor):
        return []
    mesh, shape, placements = matrix.device_mesh, list(matrix.shape), matrix.placements
    axes = [axis for axis, placement in enumerate(placements) if not placement.is_replicate()]
    dims = [placements[axis].dim for axis in axes]  # type: ignore[attr-defined]
    if len(set(dims)) == len(dims) or any(isinstance(placement, _StridedShard) for placement in placements):
        axes.reverse()
    shardings = []
    for axis in axes:
        dim, parts = placements[axis].dim, mesh.size(axis)  # type: ignore[attr-defined]
        # DTensor makes equal parts, rounded up; the last ones are shorter or empty.
        part = -(-shape[dim] // parts)
        lengths = tuple(max(0, min(part, shape[dim] - part * index)) for index in range(parts))
        shape[dim] = lengths[mesh.get_local_rank(axis)]
        shardings.append(_Sharding(dim=dim, lengths=lengths, group=mesh.get_group(axis)))
    return shardings


def _exchanged(parts: Sequence[Tensor], sharding: _Sharding) -> Tensor:
    """Send part r to rank r of a group; returns what each rank has sent, padded to the longest part."""
    sent = _buffer(parts[0], sharding)
    for place, part in zip(sent, parts, strict=False):
        place.narrow(sharding.dim, 0, part.shape[sharding.dim]).copy_(part)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=sharding.group)
    return received


def _buffer(like: Tensor, sharding: _Sharding) -> Tensor:
    """Zeros for one part per rank, each with the length of the longest: [ranks, rows, columns]."""
    shape = list(like.shape)
    shape[sharding.dim] = max(sharding.lengths)
    return like.new_zeros((len(sharding.lengths), *shape))


def _gathered(local: Tensor, sharding: _Sharding) -> Tensor:
    """The parts of all ranks of a group, concatenated."""
    parts = list(_buffer(local, sharding))
    own = parts[sharding.group.rank()].clone()
    own.narrow(sharding.dim, 0, local.shape[sharding.dim]).copy_(local)
    dist.all_gather(parts, own, group=sharding.group)
    return _joined(parts, sharding)


def _joined(parts: Iterable[Tensor], sharding: _Sharding) -> Tensor:
    """The whole matrix from its parts, which may be padded beyond their ranks' lengths."""
    pairs = zip(parts, sharding.lengths, strict=True)
    return torch.cat([part.narrow(sharding.dim, 0, length) for part, length in pairs], sharding.dim)


class MuonFactory:
    """Builds Muon and AdamW as one optimizer, so that checkpoints and the schedule see one."""

    def __init__(self, config: Muon) -> None:
        self._config = config

    def build(self, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        config = self._config
        matrices = [p for name, p in parameters.items() if config.applies_to(name, p.ndim)]
        others = [p for name, p in parameters.items() if not config.applies_to(name, p.ndim)]
        parts: list[torch.optim.Optimizer] = []
        if matrices:
            parts.append(
                WholeMuon(
                    matrices,
                    lr=config.lr,
                    weight_decay=config.weight_decay,
                    momentum=config.momentum,
                    nesterov=config.nesterov,
                    ns_steps=config.newton_schulz_steps,
                    adjust_lr_fn=config.adjust_lr,
                )
            )
        if others:
            parts.append(fused_adamw(config, others))
        return Together(parts)


class WholeMuon(torch.optim.Muon):
    """torch's Muon, but it orthogonalises full matrices.

    With DTensors, torch's Muon needs collectives for every product, and sums in another order. Here each rank of FSDP2
    gathers some of the equally sharded matrices, in bfloat16 like the orthogonalisation.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            groups: dict[Any, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    placements = parameter.placements if isinstance(parameter, DTensor) else None
                    groups.setdefault((parameter.shape, placements), []).append(parameter)
            for parameters in groups.values():
                size = sharing_ranks(parameters[0])
                for start in range(0, len(parameters), size):
                    self._step(parameters[start : start + size], group)

    def _step(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        def orthogonalise(update: Tensor) -> Tensor:
            orthogonal: Tensor = torch_muon._zeropower_via_newtonschulz(
                update, group["ns_coefficients"], group["ns_steps"], group["eps"]
            )
            return orthogonal

        updates = map_whole([self._update(parameter, group) for parameter in parameters], orthogonalise)
        rate = torch_muon._adjust_lr(group["lr"], group["adjust_lr_fn"], parameters[0].shape)
        for parameter, update in zip(parameters, updates, strict=True):
            local_part(parameter).mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-rate)

    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> Tensor:
        """The average of a parameter's gradients: bfloat16, sharded like the parameter."""
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient, memory_format=torch.preserve_format)
        average: Tensor = state["momentum_buffer"]
        average.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(average, group["momentum"]) if group["nesterov"] else average
        # The Newton-Schulz iteration divides in place, so copy also a gradient that is bfloat16 already.
        return update.to(torch.bfloat16, copy=True)


class Together(torch.optim.Optimizer):
    """Several optimizers over different parameters as one optimizer: param groups, state and steps."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        self._parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        for part in parts:
            self.state.update(part.state)
        self._share()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        start = 0
        for part in self._parts:
            part.param_groups = self.param_groups[start : start + len(part.param_groups)]
            part.state = self.state
            start += len(part.param_groups)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self._parts:
            part.step()
