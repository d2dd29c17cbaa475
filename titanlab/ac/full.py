"""ac=full: every block is computed again."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from titanlab.ac.block import checkpoint_block
from titanlab.ac.full_schema import FullCheckpointing


def apply(config: FullCheckpointing, blocks: Mapping[int, nn.Module]) -> None:
    """Checkpoint all blocks, in place."""
    for block in blocks.values():
        checkpoint_block(block)
