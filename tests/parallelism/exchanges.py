"""An exchange of keys and values, with numbers that say whose they are."""

from __future__ import annotations

import torch
import torch.distributed as dist

from titanlab.parallelism.head_tail import owned

HALF, HEADS, WIDTH = 3, 2, 4


def exchanged(method):
    """What this rank gets of the others by `method`, and the sums that come back for its own keys.

    Every key is the number of its chunk, and every value is 100 more; a rank's gradients are its number + 1.

    Returns:
        blocks: `later`, `chunks`, and the number of each half in keys and in values.
        gradients: of the head and the tail, for keys and for values.
    """
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    rank, ranks = group.rank(), group.size()
    chunks = torch.tensor(owned(rank, ranks), dtype=torch.float32).repeat_interleave(HALF)
    keys = chunks.view(1, -1, 1, 1).expand(2, -1, HEADS, WIDTH).contiguous()
    # A second sequence of the batch has other numbers.
    keys[1] += 0.5
    exchange = method((keys, keys + 100), group)
    into = torch.zeros_like(keys), torch.zeros_like(keys)
    blocks = []
    for block in exchange.blocks():
        halves = [[_numbers(part[row]) for row in (0, 1)] for part in (block.k, block.v)]
        blocks.append((block.later, block.chunks, halves))
        given = torch.full_like(block.k, rank + 1.0), torch.full_like(block.v, 10.0 * (rank + 1))
        exchange.give(given, into)
    exchange.collect(into)
    return blocks, [_numbers(part[0]) for part in into]


def _numbers(part):
    """The one number of each half of a sequence."""
    numbers = []
    for piece in part.split(HALF):
        (number,) = piece.unique().tolist()
        numbers.append(number)
    return numbers


def check(results):
    """Check what every rank has got."""
    ranks = len(results)
    for rank, (blocks, gradients) in enumerate(results):
        seen = []
        for later, chunks, ((keys, others), (values, other_values)) in blocks:
            assert keys == [float(chunk) for chunk in chunks]
            assert others == [chunk + 0.5 for chunk in chunks]
            assert values == [chunk + 100.0 for chunk in chunks]
            assert other_values == [chunk + 100.5 for chunk in chunks]
            seen += [(later, chunk) for chunk in chunks]
        expected = [(False, owned(other, ranks)[0]) for other in range(rank)]
        expected += [(True, chunk) for other in range(rank + 1, ranks) for chunk in owned(other, ranks)]
        assert sorted(seen) == sorted(expected)
        # All others have used the head; the ranks before this one have used the tail too.
        head = sum(other + 1.0 for other in range(ranks) if other != rank)
        tail = sum(other + 1.0 for other in range(rank))
        assert gradients == [[head, tail], [10 * head, 10 * tail]]
