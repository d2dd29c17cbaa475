"""torchao's formats: a wrapped tensor has the codes and scales that it is given, and reads as their product."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from titanlab.options import schema_of
from titanlab.techniques.optimizer.adamw import LowBitFactory, format_of

BLOCK, ROWS, COLUMNS = 16, 3, 64
CPU = torch.device("cpu")


def empty(kind):
    """A format, and codes and scales of zeros for a matrix."""
    made = format_of(kind, BLOCK, CPU)
    codes = torch.zeros(ROWS, COLUMNS // made.per_code, dtype=made.dtype)
    return made, codes, torch.zeros(ROWS, COLUMNS // BLOCK)


every = pytest.mark.parametrize("kind", ["adamw_4bit", "adamw_8bit", "adamw_fp8"])


@every
def test_a_code_takes_the_bytes_that_the_config_counts(kind):
    made, codes, _ = empty(kind)
    bytes_of_element = codes.element_size() / made.per_code
    assert bytes_of_element == 1 / schema_of("optimizer", kind).per_byte


@every
@pytest.mark.parametrize("signed", [True, False])
def test_a_wrapped_tensor_shares_the_storage_of_its_parts(kind, signed):
    made, codes, scale = empty(kind)
    tensor = made.wrap(codes, scale.view(-1), torch.Size((ROWS, COLUMNS)), signed=signed)
    assert tuple(tensor.shape) == (ROWS, COLUMNS)
    values = torch.rand(ROWS, COLUMNS) + 0.5
    tensor.copy_(values)
    assert codes.view(torch.uint8).any()
    assert scale.all()
    # The largest element of a block has the scale, and no element is far from its value.
    assert torch.allclose(scale, values.view(ROWS, -1, BLOCK).amax(-1) / (448.0 if kind == "adamw_fp8" else 1.0))
    assert torch.allclose(tensor.dequantize(), values, atol=0.25 if kind == "adamw_4bit" else 0.06)


@pytest.mark.parametrize("kind", ["adamw_8bit", "adamw_4bit"])
def test_only_averages_with_a_sign_have_one(kind):
    """The two tables have other values for the same codes: the second average would lose a bit."""
    values = torch.linspace(-1, 1, ROWS * COLUMNS).view(ROWS, COLUMNS)
    kept = {}
    for signed in (True, False):
        made, codes, scale = empty(kind)
        tensor = made.wrap(codes, scale.view(-1), torch.Size((ROWS, COLUMNS)), signed=signed)
        tensor.copy_(values if signed else values.abs())
        kept[signed] = tensor.dequantize()
    assert (kept[True] < 0).any()
    assert (kept[False] >= 0).all()
    error = {signed: (kept[signed].abs() - values.abs()).abs().mean() for signed in kept}
    assert error[False] < error[True]


@every
def test_the_optimizer_of_a_kind_has_its_format(kind):
    parameters = {"a": nn.Parameter(torch.ones(64, 64)), "b": nn.Parameter(torch.ones(8))}
    optimizer = LowBitFactory(schema_of("optimizer", kind)(block_size=BLOCK)).build(parameters)
    assert optimizer._format.dtype == (torch.float8_e4m3fn if kind == "adamw_fp8" else torch.uint8)
    assert optimizer._block_size == BLOCK
