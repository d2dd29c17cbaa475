"""Collectives along the first dim: the order of ranks, the sum, and tensors that are not contiguous."""

from __future__ import annotations

import torch
import torch.distributed as dist

from titanlab.parallelism.collectives import gather_first, reduce_scatter, sum_all, sum_and_scatter_first


def results():
    """Of this rank: each function on a matrix that is transposed in memory."""
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    rank, ranks = group.rank(), group.size()
    part = (torch.arange(6.0).view(3, 2) + 100 * rank).T
    whole = (torch.arange(6.0 * ranks).view(3, 2 * ranks) * (rank + 1)).T
    before = whole.clone()
    output = torch.full((2, 3), -1.0)
    reduce_scatter(output, whole.contiguous(), group)
    found = {
        "gathered": gather_first(part, group).tolist(),
        "scattered": sum_and_scatter_first(whole, group).tolist(),
        "written": output.tolist(),
        "summed": sum_all(part, group).tolist(),
        "empty": list(gather_first(torch.zeros(0, 3), group).shape),
    }
    assert torch.equal(whole, before)
    assert part[0, 0] == 100 * rank
    return found


def test_parts_are_in_the_order_of_ranks_and_sums_are_of_all(pool):
    for ranks in (1, 2):
        parts = [torch.arange(6.0).view(3, 2).T + 100 * rank for rank in range(ranks)]
        total = torch.arange(6.0 * ranks).view(3, 2 * ranks).T * sum(range(1, ranks + 1))
        for rank, found in enumerate(pool.run(ranks, results)):
            own = total[2 * rank : 2 * rank + 2].tolist()
            assert found == {
                "gathered": torch.cat(parts).tolist(),
                "scattered": own,
                "written": own,
                "summed": sum(parts).tolist(),
                "empty": [0, 3],
            }
