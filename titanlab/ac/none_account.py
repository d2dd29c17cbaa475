"""What ac=none keeps of a block."""

from __future__ import annotations

from collections.abc import Sequence

from titanlab.ac.none_schema import NoCheckpointing
from titanlab.costs.account import Operation, Share, kept


def saved_bytes(config: NoCheckpointing, block: Sequence[Operation], share: Share, *, number: int) -> int:
    """Bytes that one rank keeps of block `number` between its forward and its backward: all that autograd needs."""
    return share.bytes_of(kept(block))
