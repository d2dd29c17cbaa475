"""A layout as a named DeviceMesh."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titanlab.layout import Layout


def build_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """The mesh of all ranks: one named dimension an axis, outermost first, degrees of 1 included."""
    degrees = layout.degrees()
    return init_device_mesh(device_type, tuple(degrees.values()), mesh_dim_names=tuple(degrees))


def shard_view(mesh: DeviceMesh) -> DeviceMesh:
    """The dimensions that FSDP2 takes: `[shard]`, or `[replicate, shard]` for HSDP."""
    return mesh["shard"] if mesh["replicate"].size() == 1 else mesh["replicate", "shard"]
