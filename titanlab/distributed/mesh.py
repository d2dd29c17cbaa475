"""A layout as a named DeviceMesh, and the submeshes of it that techniques need."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titanlab.costs import DATA_AXES, FSDP_AXES, Layout

# Dimensions that only the mesh of experts has.
EXPERT_AXES = ("expert_shard", "expert")


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """All ranks by the axes of their layout.

    Attributes:
        root: one named dimension per axis, outermost first, degrees of 1 included; the axes over which FSDP2 shards
            share one dimension, `layout.fsdp_name`.
        folded: one mesh for each axis of `layout.fsdp_name` if it joins several axes; else empty.
        experts: the same ranks for the parameters of experts: `pipeline`, `replicate`, `expert_shard`, `expert`; None
            without expert parallelism.
    """

    layout: Layout
    root: DeviceMesh
    folded: Mapping[str, DeviceMesh]
    experts: DeviceMesh | None = None

    def axis(self, name: str) -> DeviceMesh:
        """The ranks that differ from this rank in one axis only."""
        return self.folded[name] if name in self.folded else self._views[name]

    @functools.cached_property
    def _views(self) -> dict[str, DeviceMesh]:
        """One mesh object per axis: compiled blocks compare the meshes of tensors by identity, not by equality."""
        return {str(name): self.root[name] for name in self.root.mesh_dim_names or ()}

    @property
    def data_parallel(self) -> DeviceMesh:
        """The mesh for FSDP2: one dimension to shard over, and for HSDP the dimension of the replicas before it."""
        name = self.layout.fsdp_name
        return self.root[name] if self.layout.replicate == 1 else self.root["replicate", name]

    @property
    def expert_axis(self) -> DeviceMesh:
        """The ranks that share the experts."""
        assert self.experts is not None
        return self.experts["expert"]

    @property
    def expert_data_parallel(self) -> DeviceMesh:
        """As `data_parallel`, for the parameters of experts."""
        assert self.experts is not None
        return self.experts["expert_shard"] if self.layout.replicate == 1 else self.experts["replicate", "expert_shard"]

    def coordinate(self, name: str) -> int:
        """This rank's number on an axis."""
        if name not in FSDP_AXES:
            return int(self.root.get_local_rank(name))
        number = int(self.root.get_local_rank(self.layout.fsdp_name))
        degrees = self.layout.degrees()
        inner = math.prod(degrees[axis] for axis in FSDP_AXES[FSDP_AXES.index(name) + 1 :])
        return number // inner % degrees[name]

    @property
    def data_rank(self) -> int:
        """This rank's number among the ranks that read different sequences: 0 to layout.data − 1."""
        number, degrees = 0, self.layout.degrees()
        for name in DATA_AXES:
            number = number * degrees[name] + self.coordinate(name)
        return number

    def groups(self) -> dict[str, dist.ProcessGroup]:
        """Process groups by the name of their axis, or of FSDP2's joint dimension, where the degree is above 1."""
        views = {**self._views, **{name: view for name, view in self.folded.items() if name != FSDP_AXES[0]}}
        if self.experts is not None:
            views |= {name: self.experts[name] for name in EXPERT_AXES}
        return {name: view.get_group() for name, view in views.items() if view.size() > 1}


def build_mesh(layout: Layout, device_type: str) -> Mesh:
    """The mesh of all ranks; a collective call."""
    sizes: dict[str, int] = {}
    for name, degree in layout.degrees().items():
        sizes.update({layout.fsdp_name: layout.fsdp} if name in FSDP_AXES else {name: degree})
    root = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    axes, folded = layout.fsdp_axes, {}
    if len(axes) > 1:
        degrees = tuple(layout.degrees()[name] for name in axes)
        # Private, the same in torch 2.10 to 2.13. The public method, slicing a flattened dimension, is deprecated.
        unfolded = root[layout.fsdp_name]._unflatten(0, degrees, axes)
        folded = {name: unfolded[name] for name in axes}
    return Mesh(layout=layout, root=root, folded=folded, experts=_expert_mesh(layout, device_type))


def _expert_mesh(layout: Layout, device_type: str) -> DeviceMesh | None:
    """The ranks arranged for experts: ranks that divide experts among them are neighbours."""
    if layout.expert == 1:
        return None
    sizes = {
        "pipeline": layout.pipeline,
        "replicate": layout.replicate,
        "expert_shard": layout.expert_shard,
        "expert": layout.expert,
    }
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
