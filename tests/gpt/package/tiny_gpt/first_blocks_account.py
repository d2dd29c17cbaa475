"""What ac=first_blocks keeps of a block."""

from __future__ import annotations

from collections.abc import Sequence

from tiny_gpt.first_blocks_schema import FirstBlocks
from titanlab.costs.account import Operation, Share, block_input, kept


def saved_bytes(config: FirstBlocks, block: Sequence[Operation], share: Share, *, number: int) -> int:
    """Bytes that one rank keeps of block `number` between its forward and its backward."""
    return share.bytes_of([block_input(block)] if number < config.count else kept(block))
