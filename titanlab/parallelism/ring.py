"""Ring attention (arXiv 2310.01889): ranks pass on blocks of keys and values while they use the current block.

Blocks move *down*, from rank r to r−1: a rank's keys first reach the ranks before it, which need all of them, and after
rank 0 the ranks after it, which need only the head. So rank 0 drops the tail, and only keys that are used are sent:
three quarters of the n·(n−1) blocks of a full ring. (Upwards, tails would pass through ranks that do not need them.)

Gradients do not follow the ring: each part is sent directly to the owner of the keys, in the kernel's dtype, and added
there in float32. That takes as many messages as a ring, and in 16 bits half the bytes, because a ring would have to
send running sums in float32; and no rank waits for a neighbour's sum.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.distributed import P2POp, ProcessGroup, batch_isend_irecv, irecv, isend

from titanlab.parallelism.head_tail import KeysAndValues, Pair, owned


class Ring:
    """Transfers the keys and values of one attention, and their gradients; the constructor sends the first block.

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

    def blocks(self) -> Iterator[KeysAndValues]:
        while self._block is not None:
            block = self._block.received()
            self._step += 1
            self._block = self._pass_on(block, step=self._step + 1)
            later = self._is_later(self._step)
            owner = (self._rank + self._step) % self._ranks
            yield KeysAndValues(*block, later=later, chunks=owned(owner, self._ranks)[: 1 + later])

    def give(self, gradients: Pair, into: Pair) -> None:
        self.collect(into)
        # The block's owner is `step` ranks above; the gradients of this rank's keys come from the rank `step` below. A
        # rank before this one has used all keys, a rank after it only the head.
        owner, sender = ((self._rank + step) % self._ranks for step in (self._step, -self._step))
        expected = self._empty(whole=sender < self._rank)
        self._gradients = Transfer(gradients, owner, expected, sender, self._group)

    def collect(self, into: Pair) -> None:
        if self._gradients is not None:
            for gradient, part in zip(into, self._gradients.received(), strict=True):
                gradient[:, : part.shape[1]] += part
            self._gradients = None

    def _pass_on(self, block: Pair, *, step: int) -> Transfer | None:
        """Send a block down, and receive the block of the rank `step` ranks above; None after the last."""
        if step >= self._ranks:
            return None
        if self._rank == 0:
            block = first_halves(block)
        below, above = ((self._rank + offset) % self._ranks for offset in (-1, 1))
        return Transfer(block, below, self._empty(whole=self._is_later(step)), above, self._group)

    def _is_later(self, step: int) -> bool:
        return self._rank + step < self._ranks

    def _empty(self, *, whole: bool) -> Pair:
        k, v = self._local if whole else first_halves(self._local)
        return k.new_empty(k.shape), v.new_empty(v.shape)


class Transfer:
    """A pair in transfer to one rank of the group, and another from one; with NCCL one launch.

    A pair is two messages: copying keys and values into one buffer costs more than a second message.
    """

    def __init__(self, sent: Pair, to: int, expected: Pair, source: int, group: ProcessGroup) -> None:
        # Kept until they are sent, even if the caller drops them.
        self._sent = tuple(x.contiguous() for x in sent)
        self._expected = expected
        self._works = batch_isend_irecv(
            [P2POp(isend, x, group=group, group_peer=to) for x in self._sent]
            + [P2POp(irecv, x, group=group, group_peer=source) for x in expected]
        )

    def received(self) -> Pair:
        """Wait for the send and the receive; return the received pair."""
        for work in self._works:
            work.wait()
        return self._expected


def first_halves(pair: Pair) -> Pair:
    """The first half of each sequence: [batch, seq, …] → [batch, seq / 2, …]."""
    k, v = (x[:, : x.shape[1] // 2] for x in pair)
    return k, v
