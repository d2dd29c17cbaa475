"""Blocks that are recomputed: their forward is replaced and nothing else."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn

from titanlab.techniques.ac.recomputation import WholeBlocks, checkpoint_block
from titanlab.techniques.ac.recomputation_schema import FullCheckpointing, NoCheckpointing, SelectiveLayer


class Block(nn.Module):
    """Counts its forward passes."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0, 3.0]))
        self.calls = 0

    def forward(self, x, *, power=2):
        self.calls += 1
        return (x * self.weight) ** power


def gradients(block, **named):
    x = torch.tensor([1.0, -1.0], requires_grad=True)
    block.weight.grad = None
    output = block(x, **named)
    output.sum().backward()
    return output.tolist(), x.grad.tolist(), block.weight.grad.tolist()


@pytest.mark.parametrize("named", [{}, {"power": 3}])
def test_a_block_is_run_again_in_its_backward_and_computes_the_same(named):
    plain, recomputed = Block(), Block()
    checkpoint_block(recomputed)
    assert gradients(recomputed, **named) == gradients(plain, **named)
    assert (plain.calls, recomputed.calls) == (1, 2)


def test_without_gradients_it_runs_once():
    block = Block()
    checkpoint_block(block)
    with torch.no_grad():
        assert block(torch.ones(2)).tolist() == [4, 9]
    assert block.calls == 1


def test_names_of_parameters_stay():
    block = Block()
    checkpoint_block(block)
    assert dict(block.named_parameters()) == {"weight": block.weight}
    assert list(block.named_modules()) == [("", block)]


def test_a_forward_that_was_replaced_before_is_the_one_that_is_recomputed():
    block, calls = Block(), []

    def other(self, x):
        calls.append(len(calls))
        return x * self.weight * 10

    block.forward = types.MethodType(other, block)
    checkpoint_block(block)
    output, *_ = gradients(block)
    assert output == [20, -30]
    assert (calls, block.calls) == ([0, 1], 0)


def test_each_forward_pass_gets_contexts_of_its_own():
    block, made = Block(), []

    class Context:
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            made.append(self.name)

        def __exit__(self, *error):
            return None

    def contexts():
        number = len(made)
        return Context(f"forward {number}"), Context(f"again {number}")

    checkpoint_block(block, contexts)
    first = block(torch.ones(2, requires_grad=True)).sum()
    second = block(torch.ones(2, requires_grad=True)).sum()
    (first + second).backward()
    assert sorted(made) == ["again 0", "again 1", "forward 0", "forward 1"]


@pytest.mark.parametrize(
    ("config", "replaced"),
    [
        (NoCheckpointing(), []),
        (FullCheckpointing(), [3, 4, 7]),
        (SelectiveLayer(every=2), [4]),
        (SelectiveLayer(every=2, keep=True), [3, 7]),
    ],
)
def test_blocks_are_chosen_by_their_number(config, replaced):
    blocks = {number: Block() for number in (3, 4, 7)}
    WholeBlocks(config).apply(blocks)
    assert [number for number, block in blocks.items() if "forward" in vars(block)] == replaced
