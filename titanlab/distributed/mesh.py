"""A layout as a named DeviceMesh, and the views of it that techniques need."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titanlab.costs.layout import Layout

FOLDED = "shard·context"


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """All ranks by the axes of their layout.

    Attributes:
        layout: the degrees.
        root: one named dimension an axis, outermost first, degrees of 1 included; shard and context are one, `FOLDED`,
            where there is a context: ranks of one context hold parts of the same sequences, their gradients are
            summed as those of different sequences are, and parameters are sharded over both.
        context: the axis of its own that the folded one has for those who share a sequence.
    """

    layout: Layout
    root: DeviceMesh
    context: DeviceMesh | None

    def axis(self, name: str) -> DeviceMesh:
        """The ranks that differ from this one in one axis only."""
        if name == "context" and self.context is not None:
            return self.context
        return self._views[name]

    @functools.cached_property
    def _views(self) -> dict[str, DeviceMesh]:
        """One object an axis: compiled blocks ask whether what two tensors lie on is the same, not equal."""
        return {str(name): self.root[name] for name in self.root.mesh_dim_names or ()}

    @property
    def data_parallel(self) -> DeviceMesh:
        """What FSDP2 takes: one dimension to shard over, before it that of the replicas for HSDP."""
        name = FOLDED if self.context is not None else "shard"
        return self.root[name] if self.layout.replicate == 1 else self.root["replicate", name]

    def place(self, name: str) -> int:
        """This rank's number on an axis."""
        if name in ("shard", "context"):
            folded = int(self.root.get_local_rank(FOLDED if self.context is not None else "shard"))
            return folded // self.layout.context if name == "shard" else folded % self.layout.context
        return int(self.root.get_local_rank(name))

    @property
    def data_rank(self) -> int:
        """This rank's number among those that read different sequences: 0 to replicate · shard − 1."""
        return self.place("replicate") * self.layout.shard + self.place("shard")

    def groups(self) -> dict[str, dist.ProcessGroup]:
        """The process group of every axis, and of the folded one, whose degree is more than 1."""
        views = dict(self._views)
        if self.context is not None:
            views["context"] = self.context
        return {name: view.get_group() for name, view in views.items() if view.size() > 1}


def build_mesh(layout: Layout, device_type: str) -> Mesh:
    """The mesh of all ranks, which call this together."""
    names = ("pipeline", "replicate", FOLDED if layout.context > 1 else "shard", "tensor")
    degrees = (layout.pipeline, layout.replicate, layout.fsdp, layout.tensor)
    root = init_device_mesh(device_type, degrees, mesh_dim_names=names)
    context = None
    if layout.context > 1:
        # Private, in torch 2.10 to 2.13 alike; the public way, slicing a flattened dimension, warns that it will go.
        context = root[FOLDED]._unflatten(0, (layout.shard, layout.context), ("shard", "context"))["context"]
    return Mesh(layout=layout, root=root, context=context)
