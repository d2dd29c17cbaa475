"""What tests of optimizers do on several ranks: the same given gradients for every layout."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from titanlab.techniques.optimizer.contract import Schedule

SHAPES = {
    "tok_embeddings.weight": (96, 256),
    "layers.0.attention.wq.weight": (64, 512),
    # Three that are cut alike: more than there are ranks to share them.
    "layers.1.attention.wq.weight": (64, 512),
    "layers.2.attention.wq.weight": (64, 512),
    "layers.0.feed_forward.w1.weight": (70, 512),  # rows that are cut unevenly
    "layers.0.gate.weight": (1, 512),  # of whose single row some ranks have nothing
    "layers.0.norm.weight": (64,),
}
# Axes of a mesh of so many ranks, and how it cuts every parameter: the first is FSDP2's, the second of tensor parallelism.
CUTS = {
    "fsdp": ((2,), [Shard(0)]),
    "columns": ((2,), [Shard(1)]),
    "copies": ((2,), [Replicate()]),
    "fsdp and rows": ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
    "fsdp and columns": ((2, 2), [Shard(0), Shard(1)]),
}


def parameters(dtype=torch.float32):
    """Whole, and the same wherever they are made."""
    draw = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=draw).to(dtype)) for name, shape in SHAPES.items()}


def gradients(step):
    draw = torch.Generator().manual_seed(1 + step)
    return {name: torch.randn(shape, generator=draw) * 0.1 for name, shape in SHAPES.items()}


def stepped(config, cut=None, steps=5, dtype=torch.float32):
    """Parameters after some steps with given gradients, whole; on the ranks of a mesh if `cut` names one."""
    mesh = None
    if cut is not None:
        torch.distributed.init_process_group("gloo")
        mesh = init_device_mesh("cpu", CUTS[cut][0], mesh_dim_names=("shard", "tensor")[: len(CUTS[cut][0])])

    def placed(tensor):
        return tensor if mesh is None else spread(tensor, mesh, CUTS[cut][1])

    held = {name: nn.Parameter(placed(whole.data)) for name, whole in parameters(dtype).items()}
    optimizer = config.implementation().build(held)
    for step in range(steps):
        for name, gradient in gradients(step).items():
            held[name].grad = placed(gradient.to(dtype))
        optimizer.step()
    return {name: whole(p) for name, p in held.items()}, {name: local(p) for name, p in held.items()}


def spread(tensor, mesh, placements):
    """As FSDP2 and tensor parallelism leave it: vectors are cut once or not at all, rows that do not divide unequally."""
    if tensor.ndim == 1:
        placements = [Replicate() if each.is_shard(1) else each for each in placements]
    if not any(isinstance(each, _StridedShard) for each in placements):
        return distribute_tensor(tensor, mesh, placements)
    part = tensor
    # The second axis cuts first. The last ranks may have no rows.
    for axis in (1, 0):
        parts, rank = part.chunk(mesh.size(axis)), mesh.get_local_rank(axis)
        part = parts[rank] if rank < len(parts) else part[:0]
    return DTensor.from_local(part, mesh, placements, shape=tensor.shape, stride=tensor.stride())


def whole(parameter):
    data = parameter.detach()
    return (data.full_tensor() if isinstance(data, DTensor) else data).clone()


def local(parameter):
    data = parameter.detach()
    return (data.to_local() if isinstance(data, DTensor) else data).clone()


def gentle(schema, **given):
    """A config whose eps leaves gradients that are nothing but rounding alone (see tests/prove/parity_rows.py)."""
    return schema(lr=1e-3, eps=1e-6, schedule=Schedule(warmup_steps=2), **given)
