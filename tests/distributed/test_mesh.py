"""The mesh of a layout: each rank's number on each axis, and the groups that share what they share.

One process stands for each rank in turn: nothing is sent.
"""

from __future__ import annotations

import contextlib

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from titanlab.costs import DATA_AXES, Layout
from titanlab.distributed import build_mesh

LAYOUTS = [
    Layout(),
    Layout(replicate=4),
    Layout(shard=4),
    Layout(context=2),
    Layout(tensor=2),
    Layout(pipeline=2),
    Layout(replicate=2, shard=2),
    Layout(shard=2, context=2),
    Layout(shard=2, context=2, tensor=2),
    Layout(pipeline=2, replicate=2, shard=2, context=2, tensor=2),
    Layout(shard=2, context=3),
    Layout(shard=4, expert=2),
    Layout(replicate=2, shard=2, context=2, expert=4),
    Layout(pipeline=2, shard=2, tensor=2, expert=2),
]
every = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.label)


@contextlib.contextmanager
def rank_of(layout, rank):
    """The mesh, as this rank sees it."""
    dist.init_process_group("fake", rank=rank, world_size=layout.world, store=FakeStore())
    try:
        yield build_mesh(layout, "cpu")
    finally:
        dist.destroy_process_group()


def of_every_rank(layout, function):
    values = []
    for rank in range(layout.world):
        with rank_of(layout, rank) as mesh:
            values.append(function(mesh))
    return values


@every
def test_every_rank_has_a_place_of_its_own(layout):
    """In the order of the axes, of which the last is innermost: neighbours on a host share the most."""
    found = of_every_rank(
        layout, lambda mesh: (mesh.data_rank, {axis: mesh.coordinate(axis) for axis in layout.degrees()})
    )
    places = [tuple(place.values()) for _, place in found]
    assert len(set(places)) == layout.world
    assert places == sorted(places)
    # Ranks that read other data have other numbers, and those that share their sequences have the same.
    assert {number for number, _ in found} == set(range(layout.data))
    assert len({(number, *(place[axis] for axis in DATA_AXES)) for number, place in found}) == layout.data


@every
def test_fsdp_shards_over_all_axes_that_shard_and_each_axis_of_several_ranks_has_a_group(layout):
    with rank_of(layout, 0) as mesh:
        sharded = mesh.data_parallel.mesh.shape
        sizes = {name: group.size() for name, group in mesh.groups().items()}
    assert tuple(sharded) == ((layout.fsdp,) if layout.replicate == 1 else (layout.replicate, layout.fsdp))
    assert all(size > 1 for size in sizes.values())
    for axis, degree in layout.degrees().items():
        if degree > 1 and axis != "shard":
            assert sizes[axis] == degree, axis
    if layout.fsdp > 1:
        assert sizes[layout.fsdp_name] == layout.fsdp


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout.expert > 1], ids=lambda layout: layout.label)
def test_ranks_that_share_experts_are_neighbours(layout):
    found = of_every_rank(
        layout, lambda mesh: (tuple(mesh.expert_axis.mesh.tolist()), tuple(mesh.expert_data_parallel.mesh.shape))
    )
    groups = [group for group, _ in found]
    assert set(groups) == {
        tuple(range(first, first + layout.expert)) for first in range(0, layout.world, layout.expert)
    }
    for rank, group in enumerate(groups):
        assert rank in group
    replicas = () if layout.replicate == 1 else (layout.replicate,)
    assert {shape for _, shape in found} == {(*replicas, layout.expert_shard)}


def test_an_axis_is_one_object():
    """Compiled blocks compare the meshes of tensors by identity."""
    with rank_of(Layout(shard=2, context=2, tensor=2), 0) as mesh:
        for axis in ("tensor", "context", "shard", "replicate", "pipeline"):
            assert mesh.axis(axis) is mesh.axis(axis)
