"""What ac=full keeps of a block."""

from __future__ import annotations

from collections.abc import Sequence

from titanlab.ac.full_schema import FullCheckpointing
from titanlab.costs.account import Operation, Share, block_input


def saved_bytes(config: FullCheckpointing, block: Sequence[Operation], share: Share, *, number: int) -> int:
    """Bytes that one rank keeps of block `number` between its forward and its backward: its input."""
    return share.bytes_of([block_input(block)])
