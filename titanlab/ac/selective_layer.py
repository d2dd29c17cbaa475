"""ac=selective_layer: every n-th block is computed again, or all but every n-th."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from titanlab.ac.block import checkpoint_block
from titanlab.ac.selective_layer_schema import SelectiveLayer


def apply(config: SelectiveLayer, blocks: Mapping[int, nn.Module]) -> None:
    """Checkpoint the chosen ones of the blocks, which go by their number in the whole model, in place."""
    for number, block in blocks.items():
        if config.chooses(number):
            checkpoint_block(block)
