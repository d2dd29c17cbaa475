"""Rows between ranks in parts of any size: they arrive in the order of ranks, and gradients go back where they came from."""

from __future__ import annotations

import torch
import torch.distributed as dist

from titanlab.parallelism.expert import exchange

# From each rank to each, in two numbers that are summed: none, some, all.
SENT = [[[1, 1], [0, 3]], [[0, 0], [2, 0]]]


def exchanged(sent):
    """The rows of this rank's that arrive, and the gradient of the rows that it has sent."""
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    rank = group.rank()
    counts = torch.tensor(sent)
    own, arriving = counts[rank].flatten(), counts[:, rank].flatten()
    rows = (10.0 * rank + torch.arange(float(own.sum()))).view(-1, 1).expand(-1, 3).contiguous().requires_grad_()
    total = int(arriving.sum())
    arrived = exchange(rows, own, arriving, total, group.group_name)
    (arrived * torch.arange(1.0, total + 1).view(-1, 1) * (100.0 if rank else 1.0)).sum().backward()
    return arrived[:, 0].tolist(), arrived.shape[1:], rows.grad[:, 0].tolist()


def test_rows_arrive_in_the_order_of_ranks_and_their_gradients_return(pool):
    (first, shape, first_gradient), (second, _, second_gradient) = pool.run(2, exchanged, SENT)
    # Rank 0 has five rows: two for itself, three for rank 1, which keeps its own two.
    assert (first, second) == ([0, 1], [2, 3, 4, 10, 11])
    assert tuple(shape) == (3,)
    assert first_gradient == [1, 2, 100, 200, 300]
    assert second_gradient == [400, 500]


def test_a_rank_may_send_and_get_nothing(pool):
    (first, _, first_gradient), (second, _, second_gradient) = pool.run(
        2, exchanged, [[[0, 0], [0, 0]], [[1, 0], [0, 0]]]
    )
    assert (first, second, first_gradient, second_gradient) == ([10], [], [], [1])


def test_a_trace_knows_the_number_of_rows_that_arrive():
    counts = torch.zeros(4, dtype=torch.int64, device="meta")
    rows = torch.empty(5, 3, dtype=torch.bfloat16, device="meta")
    arrived = exchange(rows, counts, counts, 7, "no group")
    assert (arrived.shape, arrived.dtype, arrived.device.type) == ((7, 3), torch.bfloat16, "meta")
