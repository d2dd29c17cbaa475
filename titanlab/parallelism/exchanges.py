"""The two ways in which context parallelism exchanges keys and values, and returns their gradients.

Both take this rank's keys and values, [batch, seq, kv_heads, head_dim] each, contiguous, and the ranks of the context
axis, in order; the constructor starts the first transfer.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup, Work, all_to_all_single, batch_isend_irecv, irecv, isend

from titanlab.parallelism.collectives import all_gather_single
from titanlab.parallelism.head_tail import KeysAndValues, Pair, owned


class Ring:
    """Ring attention (arXiv 2310.01889): ranks pass on blocks of keys and values while they use the current block.

    Blocks move *down*, from rank r to r−1: a rank's keys first reach the ranks before it, which need all of them, and
    after rank 0 the ranks after it, which need only the head. So rank 0 drops the tail, and only keys that are used are
    sent: three quarters of the n·(n−1) blocks of a full ring. (Upwards, tails would pass through ranks that do not need
    them.)

    Gradients are sent directly to the owner of the keys, in the kernel's dtype, and added there in float32. That takes
    as many messages as a ring, which would have to send running sums in float32; and no rank waits for a neighbour's
    sum.
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


class GatherKv:
    """All-gather KV: ranks gather all keys and values while they compute the local part; two more parts follow.

    It has fewer and larger products than a ring, and needs memory for all keys and values while one attention runs; the
    backward pass gathers them again. This is the method of Llama 3 (arXiv 2407.21783, section 3.3.2). Every rank
    receives every tail, also tails that come after all of its queries. Gradients return to their owners by an
    all-to-all in the kernel's dtype, without parts that are zero, and are added in float32.
    """

    def __init__(self, local: Pair, group: ProcessGroup) -> None:
        self._group = group
        self._rank, self._ranks = group.rank(), group.size()
        sent = torch.stack(local)
        self._block_size, self._half = sent.numel(), sent.shape[2] // 2
        # [ranks, k and v, batch, seq, kv_heads, head_dim]
        self._gathered: Tensor | None = sent.new_empty(self._ranks, *sent.shape)
        self._work: Work | None = all_gather_single(self._gathered.flatten(0, 1), sent, group=group, async_op=True)
        self._sent: Tensor | None = sent
        self._returned: Tensor | None = None
        self._gradients: list[Tensor] = []

    def blocks(self) -> Iterator[KeysAndValues]:
        gathered, self._gathered = self._gathered, None
        assert gathered is not None
        assert self._work is not None
        self._work.wait()
        self._sent = self._work = None
        if self._rank > 0:
            heads = tuple(range(self._rank))
            yield KeysAndValues(*_joined(gathered[: self._rank, :, :, : self._half]), later=False, chunks=heads)
        if self._rank + 1 < self._ranks:
            chunks = (owned(owner, self._ranks) for owner in range(self._rank + 1, self._ranks))
            yield KeysAndValues(*_joined(gathered[self._rank + 1 :]), later=True, chunks=tuple(chain(*chunks)))

    def give(self, gradients: Pair, into: Pair) -> None:
        is_later = self._rank == 0 or len(self._gradients) == 1
        self._gradients.append(_by_owner(gradients, self._ranks - 1 - self._rank if is_later else self._rank))
        if is_later or self._rank + 1 == self._ranks:
            # A rank has used both halves of later ranks' keys, and only the heads of earlier ranks' keys.
            sizes = [self._sizes(whole=range(self._rank + 1, self._ranks)), self._sizes(whole=range(self._rank))]
            self._sent = torch.cat([part.flatten() for part in self._gradients])
            self._returned = self._sent.new_empty(sum(sizes[1]))
            self._work = all_to_all_single(
                self._returned, self._sent, sizes[1], sizes[0], group=self._group, async_op=True
            )

    def collect(self, into: Pair) -> None:
        if self._work is None or self._returned is None:
            return
        self._work.wait()
        batch, _, *shape = into[0].shape
        for piece in self._returned.split([size for size in self._sizes(whole=range(self._rank)) if size]):
            for gradient, part in zip(into, piece.view(2, batch, -1, *shape), strict=True):
                gradient[:, : part.shape[1]] += part

    def _sizes(self, *, whole: range) -> list[int]:
        """Elements of the gradients exchanged with each rank: of all keys for ranks in `whole`, else of the heads."""
        sizes = [self._block_size if rank in whole else self._block_size // 2 for rank in range(self._ranks)]
        sizes[self._rank] = 0
        return sizes


def _joined(gathered: Tensor) -> Pair:
    """Keys and values of several ranks as one sequence: [ranks, 2, batch, seq, …] → two [batch, ranks · seq, …]."""
    k, v = gathered.permute(1, 2, 0, *range(3, gathered.dim())).flatten(2, 3)
    return k, v


def _by_owner(gradients: Pair, owners: int) -> Tensor:
    """The inverse of `_joined`: two [batch, owners · seq, …] → [owners, 2, batch, seq, …]."""
    parts: Tensor = torch.stack(gradients).unflatten(2, (owners, -1))
    return parts.permute(2, 0, 1, *range(3, parts.dim()))
