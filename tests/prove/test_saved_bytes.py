"""Storages that a block's forward leaves for its backward, on real tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from titanlab.prove.rank_trace import SavedBytes

ROWS, WIDTH = 8, 16
STREAM = 4 * ROWS * WIDTH


class Block(nn.Module):
    """Keeps its input for the product, and the result of `sin` for nothing, of `exp` for itself."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, hidden):
        return self.linear(hidden).exp() + 1


class Checkpointed(Block):
    def forward(self, hidden):
        return checkpoint(super().forward, hidden, use_reentrant=False, preserve_rng_state=False)


class Twice(nn.Module):
    """Two blocks, called as models call them."""

    def __init__(self, block):
        super().__init__()
        self.layers = nn.ModuleDict({"0": block(), "1": block()})

    def forward(self, hidden):
        for block in self.layers.values():
            hidden = block(hidden)
        return hidden


@pytest.mark.parametrize(("block", "bytes_"), [(Block, 2 * STREAM), (Checkpointed, STREAM)])
def test_a_block_keeps_its_input_and_what_it_needs(block, bytes_):
    model = Twice(block)
    saved = SavedBytes({int(name): each for name, each in model.layers.items()})
    for _ in range(2):
        model(torch.ones(ROWS, WIDTH, requires_grad=True) * 1).sum().backward()
    assert saved.by_block == {0: bytes_, 1: bytes_}
    # The hooks are gone after the first microbatch.
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.layers.values())


def test_an_input_that_nothing_needs_is_not_counted():
    class Doubled(nn.Module):
        def forward(self, hidden):
            return hidden * 2

    model = Twice(Doubled)
    saved = SavedBytes({int(name): each for name, each in model.layers.items()})
    model(torch.ones(ROWS, WIDTH, requires_grad=True) * 1).sum().backward()
    assert saved.by_block == {0: 0, 1: 0}
