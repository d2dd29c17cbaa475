"""Weights of checkpoints and of folders of other tools: any box of a parameter, and models that do not fit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.checkpoint.storage import write
from titanlab.errors import ConfigError
from titanlab.techniques.model.llama_schema import Llama
from titanlab.train import weights_tensors
from titanlab.train.weights_folder import TensorEntry
from titanlab.train.weights_tensors import dcp_source, run_source

MODEL = Llama(dim=16, layers=1, heads=2, kv_heads=1, ffn_dim=24, vocab_size=32)
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")


def weights():
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in MODEL.account().parameters.items()}


def checkpoint(folder, tensors):
    """A checkpoint of titanlab: its source."""
    write({"model": tensors, "optimizer": {"step": torch.ones(1)}}, folder)
    return run_source(folder, MODEL, "run")


def foreign(folder, tensors, prefix=""):
    """A folder of another tool: its source."""
    state = {f"{prefix}{name}": tensor for name, tensor in tensors.items()}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    return dcp_source(folder, MODEL, "k")


@pytest.mark.parametrize("make", [checkpoint, foreign, lambda *given: foreign(*given, prefix="model.")])
def test_any_box_of_each_parameter_is_read(tmp_path, make):
    tensors = weights()
    source = make(tmp_path / "c", tensors)
    assert (source.model, source.biases) == (MODEL, {})
    assert source.entries == {
        name: TensorEntry(dtype="F32", shape=tuple(tensor.shape)) for name, tensor in tensors.items()
    }
    assert list(source.entries) == list(MODEL.account().parameters)
    for name, tensor in tensors.items():
        assert torch.equal(source.read(name, [0] * tensor.ndim, tensor.shape), tensor)
    name, tensor = next((name, tensor) for name, tensor in tensors.items() if tensor.ndim == 2)
    assert torch.equal(source.read(name, [1, 3], [4, 2]), tensor[1:5, 3:5])
    assert source.read(name, [0, 0], [0, 2]).shape == (0, 2)


def test_a_parameter_is_read_once_for_all_its_boxes(tmp_path, monkeypatch):
    source = checkpoint(tmp_path / "c", weights())
    names, real = [], weights_tensors.read_into

    def counted(state, *given):
        names.extend(state)
        real(state, *given)

    monkeypatch.setattr(weights_tensors, "read_into", counted)
    first, second = list(source.entries)[:2]
    for name in (first, first, second, first):
        source.read(name, [0] * len(source.entries[name].shape), [1] * len(source.entries[name].shape))
    assert names == [f"model.{name}" for name in (first, second, first)]


def test_the_format_is_that_of_the_checkpoint(tmp_path):
    tensors = {name: tensor.bfloat16() for name, tensor in weights().items()}
    source = checkpoint(tmp_path / "c", tensors)
    assert {entry.dtype for entry in source.entries.values()} == {"BF16"}
    name, tensor = next(iter(tensors.items()))
    assert torch.equal(source.read(name, [0, 0], tensor.shape), tensor)


@pytest.mark.parametrize("make", [checkpoint, foreign])
@pytest.mark.parametrize("change", ["missing", "int64", "float64"])
def test_a_parameter_that_is_no_plain_tensor_is_named(tmp_path, make, change):
    tensors = weights()
    name = list(tensors)[1]
    if change == "missing":
        del tensors[name]
    else:
        tensors[name] = tensors[name].to(getattr(torch, change))
    with pytest.raises(ConfigError) as caught:
        make(tmp_path / "c", tensors)
    key = "run" if make is checkpoint else "k"
    said = f"has no plain tensor {name}; give a checkpoint of the same model"
    assert str(caught.value) == f"{key}={tmp_path / 'c'}: {said}"


def test_a_folder_of_another_model_says_what_it_has(tmp_path):
    first = next(iter(weights()))
    with pytest.raises(ConfigError) as caught:
        foreign(tmp_path / "c", {name: torch.ones(2) for name in ("d", "c", "b", "a")})
    assert str(caught.value) == (
        f"k={tmp_path / 'c'}: has no parameter of the model, as {first} or model.{first}; it has a, b, c; "
        "give the --model that was saved"
    )
    with pytest.raises(ConfigError, match="it has nothing; give the --model"):
        foreign(tmp_path / "d", {})


def test_a_parameter_of_another_shape_is_named(tmp_path):
    tensors = weights()
    name, tensor = next(iter(tensors.items()))
    tensors[name] = torch.zeros(5, 6)
    with pytest.raises(ConfigError) as caught:
        foreign(tmp_path / "c", tensors)
    said = f"{name} is [5, 6] there and {list(tensor.shape)} in the model; give the --model that was saved"
    assert str(caught.value) == f"k={tmp_path / 'c'}: {said}"
