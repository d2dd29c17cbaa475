"""Ring attention: blocks of keys and values pass from rank to rank while the one at hand is used.

Blocks move *down*, from rank r to r−1: a rank's keys meet first the ranks before it, which need all of them, and after
rank 0 those behind it, which need only the head. So rank 0 drops the tail, and only what is used is ever sent: three
quarters of the n·(n−1) blocks of a full ring. (Moving up, tails would be carried through ranks that do not need them.)

Gradients do not go around: each part goes straight to the rank that owns the keys, in the type the kernel made it, and
is added there in float32. That is as many messages as a ring has, and in 16 bits half its bytes, because running sums
would have to travel in float32; and nothing waits for a neighbour's sum.

Source of the ring: Ring Attention with Blockwise Transformers (arXiv 2310.01889).
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.distributed import P2POp, ProcessGroup, batch_isend_irecv, irecv, isend

from titanlab.parallelism.head_tail import Block, Pair


class Ring:
    """The travels of one attention's keys and values, or of their gradients too. Sends the first block at once.

    Args:
        local: this rank's keys and values, [batch, seq, kv_heads, head_dim] each, contiguous.
        group: ranks of the context axis, in order.
    """

    def __init__(self, local: Pair, group: ProcessGroup) -> None:
        self._local, self._group = local, group
        self._rank, self._ranks = group.rank(), group.size()
        self._step = 0
        self._gradients: Transfer | None = None
        self._block = self._pass_on(local, step=1)

    def blocks(self) -> Iterator[Block]:
        while self._block is not None:
            held = self._block.received()
            self._step += 1
            self._block = self._pass_on(held, step=self._step + 1)
            yield Block(*held, later=self._is_later(self._step))

    def give(self, gradients: Pair, into: Pair) -> None:
        self.collect(into)
        # What comes back is of the rank as far below as the owner is above: before this rank, it has used all the keys.
        owner, giver = ((self._rank + step) % self._ranks for step in (self._step, -self._step))
        expected = self._empty(whole=giver < self._rank)
        self._gradients = Transfer(gradients, owner, expected, giver, self._group)

    def collect(self, into: Pair) -> None:
        if self._gradients is not None:
            for gradient, part in zip(into, self._gradients.received(), strict=True):
                gradient[:, : part.shape[1]] += part
            self._gradients = None

    def _pass_on(self, held: Pair, *, step: int) -> Transfer | None:
        """Send the block at hand down, and receive that of the rank `step` further up; None after the last."""
        if step >= self._ranks:
            return None
        if self._rank == 0:
            held = first_halves(held)
        below, above = ((self._rank + way) % self._ranks for way in (-1, 1))
        return Transfer(held, below, self._empty(whole=self._is_later(step)), above, self._group)

    def _is_later(self, step: int) -> bool:
        return self._rank + step < self._ranks

    def _empty(self, *, whole: bool) -> Pair:
        k, v = self._local if whole else first_halves(self._local)
        return k.new_empty(k.shape), v.new_empty(v.shape)


class Transfer:
    """A pair on its way to one rank of the group, and another on its way from one; of NCCL, one launch.

    Two messages, not one: keys and values lie in memory of their own, and copying them together costs more than a
    message does.
    """

    def __init__(self, sent: Pair, to: int, expected: Pair, source: int, group: ProcessGroup) -> None:
        # Kept until they have left, also where the caller drops them.
        self._sent = tuple(x.contiguous() for x in sent)
        self._expected = expected
        self._works = batch_isend_irecv(
            [P2POp(isend, x, group=group, group_peer=to) for x in self._sent]
            + [P2POp(irecv, x, group=group, group_peer=source) for x in expected]
        )

    def received(self) -> Pair:
        """Wait for both ways."""
        for work in self._works:
            work.wait()
        return self._expected


def first_halves(pair: Pair) -> Pair:
    """The first half of each sequence, [batch, seq, …] → [batch, seq / 2, …]."""
    k, v = (x[:, : x.shape[1] // 2] for x in pair)
    return k, v
