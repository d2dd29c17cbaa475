"""A layout as a DeviceMesh with named dimensions, and the submeshes that techniques need."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titanlab.costs import DATA_AXES, FSDP_AXES, Layout

# Dimensions that only the mesh for the parameters of experts has.
EXPERT_AXES = ("expert_shard", "expert")


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """All ranks of a run, arranged along the axes of their layout."""

    layout: Layout
    # one named dimension for each axis, outermost first, even for a degree of 1. The axes over which FSDP2 shards form
    # one joint dimension, `layout.fsdp_name`.
    root: DeviceMesh
    # one mesh for each axis that the dimension `layout.fsdp_name` joins; empty if it is a single axis.
    folded: Mapping[str, DeviceMesh]
    # a mesh of the same ranks for the parameters of experts, with the dimensions `pipeline`, `replicate`,
    # `expert_shard` and `expert`; None without expert parallelism.
    experts: DeviceMesh | None = None

    @functools.cached_property
    def _views(self) -> dict[str, DeviceMesh]:
        """One mesh object for each axis: compiled code compares the meshes of tensors by identity, not by equality."""
        return {**{str(name): self.root[name] for name in self.root.mesh_dim_names or ()}, **self.folded}

    def axis(self, name: str) -> DeviceMesh:
        """The mesh of the ranks that differ from this rank only in this axis."""
        return self._views[name]

    @property
    def data_parallel(self) -> DeviceMesh:
        """The mesh for FSDP2: the dimension to shard over, and for HSDP the dimension of the replicas before it."""
        name = self.layout.fsdp_name
        return self.root[name] if self.layout.replicate == 1 else self.root["replicate", name]

    @property
    def expert_axis(self) -> DeviceMesh:
        """The mesh of the ranks that divide the experts among them."""
        assert self.experts is not None
        return self.experts["expert"]

    @property
    def expert_data_parallel(self) -> DeviceMesh:
        """The mesh for FSDP2 of the parameters of experts, like `data_parallel`."""
        assert self.experts is not None
        return self.experts["expert_shard"] if self.layout.replicate == 1 else self.experts["replicate", "expert_shard"]

    def coordinate(self, name: str) -> int:
        """This rank's number on an axis."""
        return int(self._views[name].get_local_rank()) if name in self._views else 0

    @property
    def data_rank(self) -> int:
        """This rank's number among the ranks that read different sequences: 0 to layout.data − 1."""
        number, degrees = 0, self.layout.degrees()
        for name in DATA_AXES:
            number = number * degrees[name] + self.coordinate(name)
        return number

    def groups(self) -> dict[str, dist.ProcessGroup]:
        """Process groups with more than one rank, by the name of their axis or of FSDP2's joint dimension."""
        views = {name: view for name, view in self._views.items() if not (name in self.folded and name == FSDP_AXES[0])}
        if self.experts is not None:
            views |= {name: self.experts[name] for name in EXPERT_AXES}
        return {name: view.get_group() for name, view in views.items() if view.size() > 1}


def build_mesh(layout: Layout, device_type: str) -> Mesh:
    """Build the mesh of all ranks; a collective call: all ranks make it together."""
    sizes: dict[str, int] = {}
    for name, degree in layout.degrees().items():
        sizes.update({layout.fsdp_name: layout.fsdp} if name in FSDP_AXES else {name: degree})
    root = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    axes, folded = layout.fsdp_axes, {}
    if len(axes) > 1:
        degrees = tuple(layout.degrees()[name] for name in axes)
        # `_unflatten` is private, the same in torch 2.10 to 2.13. Slicing, which is public, is deprecated for this.
        unfolded = root[layout.fsdp_name]._unflatten(0, degrees, axes)
        folded = {name: unfolded[name] for name in axes}
    experts = None
    if layout.expert > 1:
        # `expert` is the innermost dimension: the ranks that divide the experts among them are neighbours.
        names = ("pipeline", "replicate", *EXPERT_AXES)
        experts = init_device_mesh(device_type, tuple(getattr(layout, name) for name in names), mesh_dim_names=names)
    return Mesh(layout=layout, root=root, folded=folded, experts=experts)
