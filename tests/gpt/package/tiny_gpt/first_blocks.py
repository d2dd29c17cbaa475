"""ac=first_blocks: a pipeline's first stages hold most microbatches, so that memory is scarce there."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from tiny_gpt.first_blocks_schema import FirstBlocks
from titanlab.ac.block import checkpoint_block


def apply(config: FirstBlocks, blocks: Mapping[int, nn.Module]) -> None:
    """blocks: of this rank, by their number in the whole model."""
    for number, block in blocks.items():
        if number < config.count:
            checkpoint_block(block)
