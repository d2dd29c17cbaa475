"""Interleaved orders: ranks with several stages take microbatches in rounds, depth first (arXiv 2104.04473).

In a round, a rank takes some microbatches through its first stage, then the same through its second, and so
on; backward, from its last stage to its first. The paper asks for as many microbatches in a round as there are
ranks, and with them the total a multiple of the ranks. Here rounds share microbatches out as evenly as can be,
each at least as many as there are ranks, so that any number will do; where rounds come out equal, the order
is that of torch.
"""

from __future__ import annotations

from itertools import accumulate


def rounds(*, ranks: int, microbatches: int) -> list[range]:
    """Microbatches of every round, the larger rounds first."""
    count = max(1, microbatches // ranks)
    size, rest = divmod(microbatches, count)
    ends = list(accumulate([size + 1] * rest + [size] * (count - rest)))
    return [range(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def steps(stages: list[int], *, ranks: int, microbatches: int) -> list[tuple[int, int]]:
    """(stage, microbatch) in the order in which a rank takes them.

    Args:
        stages: of the rank, in the direction of the pass.
    """
    return [
        (stage, each)
        for microbatches_of_round in rounds(ranks=ranks, microbatches=microbatches)
        for stage in stages
        for each in microbatches_of_round
    ]


def warm_up(rank: int, *, ranks: int, stages_per_rank: int, microbatches: int, per_hop: int) -> int:
    """Forward passes of a rank before it takes forward and backward in turn.

    Args:
        per_hop: how many more than the next rank: 2 while a gradient comes back as late as a forward goes out.
    """
    longest = len(rounds(ranks=ranks, microbatches=microbatches)[0])
    wanted = (stages_per_rank - 1) * longest + per_hop * (ranks - 1 - rank)
    return min(wanted, stages_per_rank * microbatches)
