"""What ac=selective_layer keeps of a block."""

from __future__ import annotations

from collections.abc import Sequence

from titanlab.ac.selective_layer_schema import SelectiveLayer
from titanlab.costs.account import Operation, Share, block_input, kept


def saved_bytes(config: SelectiveLayer, block: Sequence[Operation], share: Share, *, number: int) -> int:
    """Bytes that one rank keeps of block `number` between its forward and its backward: its input, or all."""
    return share.bytes_of([block_input(block)] if config.chooses(number) else kept(block))
