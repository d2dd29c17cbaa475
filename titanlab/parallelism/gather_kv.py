"""All-gather KV: ranks gather all keys and values while they compute the local part; two more parts follow.

It has fewer and larger products than a ring, and needs memory for all keys and values while one attention runs; the
backward pass gathers them again. This is the method of Llama 3 (arXiv 2407.21783, section 3.3.2). Every rank receives
every tail, also tails that come after all of its queries. Gradients return to their owners by an all-to-all in the
kernel's dtype, without parts that are zero, and are added in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work, all_to_all_single

from titanlab.parallelism.collectives import all_gather_single
from titanlab.parallelism.head_tail import KeysAndValues, Pair, owned


class GatherKv:
    """Gathers the keys and values of one attention and returns their gradients; the gather starts in the constructor.

    Args:
        local: this rank's keys and values, [batch, seq, kv_heads, head_dim] each, contiguous.
        group: ranks of the context axis, in order.
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
