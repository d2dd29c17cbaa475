"""A rank without the others: its collectives return at once, and its tensors have no data."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from titanlab.distributed import traced
from titanlab.parallelism.collectives import reduce_scatter
from titanlab.prove.rank_trace import fake_world


def rows_of(nccl):
    with fake_world(3, 64, nccl=nccl) as (world, mode), mode, traced({}) as traffic:
        summand = torch.empty(64 << 20)
        reduce_scatter(summand.new_empty(1 << 20), summand, dist.group.WORLD)
        assert (world.rank, world.world, dist.get_rank()) == (3, 64, 3)
        assert summand.untyped_storage().device.type == "meta"
    assert not dist.is_initialized()
    return [(row.kind, row.bytes) for row in traffic.rows()]


@pytest.mark.parametrize(("nccl", "kind"), [(True, "reduce_scatter"), (False, "all_to_all")])
def test_a_scatter_is_that_of_the_backend_for_which_it_stands(pool, nccl, kind):
    assert pool.run(1, rows_of, nccl) == [[(kind, 4 * (64 << 20))]]
