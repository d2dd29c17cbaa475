"""A model, or one rank's part of it, is filled from a source: what is read of it, and what becomes of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.weights.conftest import Tensors
from titanlab.train import weights_folder, weights_tensors
from titanlab.train.weights_tensors import fill

WEIGHT, BIAS = torch.arange(12.0).view(4, 3), torch.tensor([0.5, 1.5, 2.5, 3.5])


def test_every_parameter_has_the_numbers_of_the_source():
    model = nn.ModuleDict({"a": nn.Linear(3, 4), "norm": nn.RMSNorm(4)})
    parameters = dict(model.named_parameters())
    fill(model, Tensors(**{"a.weight": WEIGHT, "a.bias": BIAS, "norm.weight": -BIAS}))
    assert torch.equal(model["a"].weight, WEIGHT)
    assert torch.equal(model["a"].bias, BIAS)
    assert torch.equal(model["norm"].weight, -BIAS)
    # In place: the optimizer keeps its parameters, and nothing is differentiated.
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    assert all(parameter.requires_grad and parameter.grad_fn is None for parameter in parameters.values())


@pytest.mark.parametrize(
    ("stored", "wanted"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float16,) * 2]
)
def test_numbers_are_cast_to_the_parameters_dtype(stored, wanted):
    model = nn.Linear(3, 4, bias=False, dtype=wanted)
    numbers = (WEIGHT / 3).to(stored)
    fill(model, Tensors(weight=numbers))
    assert model.weight.dtype == wanted
    assert torch.equal(model.weight, numbers.to(wanted))


def test_a_stage_reads_its_own_parameters_only():
    source = Tensors(**{"layers.0.weight": WEIGHT, "layers.1.weight": WEIGHT + 1, "norm.weight": BIAS})
    stage = nn.ModuleDict({"layers": nn.ModuleDict({"1": nn.Linear(3, 4, bias=False)})})
    fill(stage, source)
    assert [name for name, _, _ in source.reads] == ["layers.1.weight"]
    assert torch.equal(stage["layers"]["1"].weight, WEIGHT + 1)


@pytest.mark.parametrize("wrapper", ["_orig_mod", "_checkpoint_wrapped_module"])
def test_names_are_those_without_wrappers(wrapper):
    model = nn.ModuleDict({"layers": nn.ModuleDict({wrapper: nn.Linear(3, 4, bias=False)})})
    fill(model, Tensors(**{"layers.weight": WEIGHT}))
    assert torch.equal(model["layers"][wrapper].weight, WEIGHT)


@pytest.mark.parametrize(("chunk_bytes", "rows"), [(48, [4]), (36, [3, 1]), (25, [2, 2]), (12, [1] * 4), (1, [1] * 4)])
def test_a_large_parameter_is_read_in_rows(monkeypatch, chunk_bytes, rows):
    """A row has 12 bytes; one that is larger than a chunk is read whole."""
    monkeypatch.setattr(weights_folder, "CHUNK_BYTES", chunk_bytes)
    model, source = nn.Linear(3, 4, bias=False), Tensors(weight=WEIGHT)
    fill(model, source)
    assert [sizes for _, _, sizes in source.reads] == [[count, 3] for count in rows]
    assert torch.equal(model.weight, WEIGHT)


def rank_of(monkeypatch, offsets, sizes):
    """As on a rank that has this box of a parameter of 4×3; a real one needs a process group."""
    box = nn.Parameter(torch.zeros(sizes))
    monkeypatch.setattr(weights_tensors, "local_part", lambda parameter: (box.data, offsets))
    return box


def test_a_rank_reads_its_part_only(monkeypatch):
    monkeypatch.setattr(weights_folder, "CHUNK_BYTES", 8)
    box, source = rank_of(monkeypatch, (1, 1), (3, 2)), Tensors(weight=WEIGHT)
    fill(nn.Linear(3, 4, bias=False), source)
    assert torch.equal(box, WEIGHT[1:4, 1:3])
    assert source.reads == [("weight", [row, 1], [1, 2]) for row in (1, 2, 3)]


@pytest.mark.parametrize("sizes", [(0, 3), (4, 0)])
def test_a_rank_without_a_part_reads_nothing(monkeypatch, sizes):
    rank_of(monkeypatch, (4, 0), sizes)
    source = Tensors(weight=WEIGHT)
    fill(nn.Linear(3, 4, bias=False), source)
    assert source.reads == []
