"""Optimizers keep as many bytes of state as they declare."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from titanlab.techniques.optimizer.contract import Stored
from titanlab.techniques.optimizer.optimizers_schema import AdamW, AdamW4bit, AdamW8bit, AdamWFp8, Muon

# A matrix of a block, one outside, a matrix that is too small for few bits, one with uneven blocks, and a vector.
SHAPES = {
    "layers.0.wq.weight": (64, 256),
    "output.weight": (128, 512),
    "layers.0.small.weight": (8, 16),
    "layers.0.odd.weight": (96, 100),
    "norm.weight": (256,),
}


def kept_bytes(optimizer) -> int:
    tensors = (value for state in optimizer.state.values() for value in state.values())
    return sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", [AdamW(), AdamW(rounding="nearest"), Muon()], ids=["adamw", "nearest", "muon"])
def test_states_of_adamw_and_muon(config, dtype):
    assert declared_and_kept(config, dtype)


@pytest.mark.parametrize("schema", [AdamW8bit, AdamW4bit, AdamWFp8])
def test_states_of_few_bits(schema):
    assert declared_and_kept(schema(), torch.float32)


def declared_and_kept(config, dtype) -> bool:
    parameters = {name: nn.Parameter(torch.ones(shape, dtype=dtype)) for name, shape in SHAPES.items()}
    optimizer = config.implementation().build(parameters)
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    declared = sum(
        config.state_bytes(Stored(name=name, shape=shape, part=shape, element_bytes=dtype.itemsize))
        for name, shape in SHAPES.items()
    )
    assert kept_bytes(optimizer) == declared
    return declared > 0
