"""Functions of whole matrices: one process computes them alone, and ranks get the parts that they had."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from titanlab.techniques.optimizer.muon import _shardings, map_whole, sharing_ranks


def test_matrices_that_are_not_sharded_are_computed_here():
    matrices = [torch.full((2, 3), float(number)) for number in range(3)]
    assert sharing_ranks(matrices[0]) == 1
    results = map_whole(matrices[:1], lambda matrix: matrix + 1)
    assert torch.equal(results[0], matrices[0] + 1)


def shardings(shape, placements, *, rank, sizes=(2, 3)):
    """Dims and lengths of the shardings that a rank sees, in their order."""
    dist.init_process_group("fake", rank=rank, world_size=6, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("one", "two"))
        tensor = distribute_tensor(torch.zeros(shape), mesh, placements, src_data_rank=None)
        assert sharing_ranks(tensor) == (len(_shardings(tensor)[-1].lengths) if _shardings(tensor) else 1)
        return [(part.dim, part.lengths, part.group.size()) for part in _shardings(tensor)], tensor.to_local().shape
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("placements", "found"),
    [
        ([Replicate(), Replicate()], []),
        ([Shard(0), Replicate()], [(0, (4, 3), 2)]),
        ([Replicate(), Shard(0)], [(0, (3, 3, 1), 3)]),
        # The first axis of the mesh comes last: FSDP2 cuts after tensor parallelism.
        ([Shard(0), Shard(1)], [(1, (2, 2, 1), 3), (0, (4, 3), 2)]),
        # Both on one dim, in the order of the mesh.
        ([Shard(0), Shard(0)], [(0, (4, 3), 2), (0, (2, 2, 0), 3)]),
    ],
)
def test_parts_are_equal_rounded_up_and_the_last_are_shorter(placements, found):
    assert shardings((7, 5), placements, rank=0)[0] == found


@pytest.mark.parametrize("rank", range(6))
def test_the_lengths_are_those_of_torch_also_where_a_part_is_empty(rank):
    for shape in ((7, 5), (1, 2), (2, 1), (6, 6)):
        found, local = shardings(shape, [Shard(0), Shard(1)], rank=rank)
        lengths = {dim: parts[rank % 3 if dim == 1 else rank // 3] for dim, parts, _ in found}
        assert (lengths[0], lengths[1]) == tuple(local), shape
