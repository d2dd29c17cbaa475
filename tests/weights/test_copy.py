"""Weights copied piece by piece: every number, in files of a bounded size, with a digest that the files do not change."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch
from safetensors.torch import load_file

from tests.weights.conftest import FORMATS, Tensors
from titanlab.errors import ConfigError
from titanlab.techniques.model.contract import Foreign
from titanlab.train import weights_folder
from titanlab.train.weights_folder import in_halves
from titanlab.train.weights_tensors import write_weights


def written(folder, source, *, foreign=None, dtype=None, shard_bytes=10**9):
    folder.mkdir()
    names = {name: Foreign(name=name) for name in source.entries} | (foreign or {})
    return write_weights(
        source, folder, stem="w", index="w.index.json", foreign=names, dtype=dtype, shard_bytes=shard_bytes
    )


def read(folder):
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


A, B = torch.arange(12.0).view(4, 3), torch.ones(5, dtype=torch.bfloat16)


def test_each_tensor_keeps_its_numbers_and_format(tmp_path):
    written(tmp_path / "c", Tensors(a=A, b=B))
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["w.safetensors"]
    found = read(tmp_path / "c")
    assert torch.equal(found["a"], A)
    assert torch.equal(found["b"], B)
    assert found["b"].dtype == torch.bfloat16


def test_files_are_bounded_and_have_an_index(tmp_path):
    written(tmp_path / "c", Tensors(a=A, b=B), shard_bytes=50)
    names = [f"w-{number:05d}-of-00002.safetensors" for number in (1, 2)]
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == [*names, "w.index.json"]
    index = json.loads((tmp_path / "c" / "w.index.json").read_text())
    assert index == {"metadata": {"total_size": 58}, "weight_map": {"a": names[0], "b": names[1]}}


def test_the_digest_is_of_names_shapes_formats_and_contents(tmp_path):
    first = written(tmp_path / "1", Tensors(a=A, b=B))
    hashes = [
        [name, FORMATS[tensor.dtype], list(tensor.shape), hashlib.sha256(tensor.view(torch.uint8).numpy()).hexdigest()]
        for name, tensor in (("a", A), ("b", B))
    ]
    assert first == hashlib.sha256(json.dumps(hashes).encode()).hexdigest()
    assert written(tmp_path / "2", Tensors(b=B, a=A), shard_bytes=1) == first
    others = [
        Tensors(a=A + 1, b=B), Tensors(a=A.view(3, 4), b=B), Tensors(a=A), Tensors(a=A, c=B), Tensors(a=A, b=B.half()),
    ]  # fmt: skip
    found = {written(tmp_path / f"other-{number}", source) for number, source in enumerate(others)}
    assert len({first, *found}) == 6


def test_large_tensors_are_read_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(weights_folder, "CHUNK_BYTES", 24)
    source = Tensors(a=A)
    first = written(tmp_path / "c", source)
    assert source.reads == [("a", [0, 0], [2, 3]), ("a", [2, 0], [2, 3])]
    assert torch.equal(read(tmp_path / "c")["a"], A)
    monkeypatch.undo()
    assert written(tmp_path / "whole", Tensors(a=A)) == first


def test_rows_of_a_head_are_turned_and_stay_together(tmp_path, monkeypatch):
    monkeypatch.setattr(weights_folder, "CHUNK_BYTES", 1)
    rows = torch.arange(16.0).view(8, 2)
    source = Tensors(wq=rows)
    written(tmp_path / "c", source, foreign={"wq": Foreign(name="q", head=4)})
    assert torch.equal(read(tmp_path / "c")["q"], in_halves(rows, 4))
    assert source.reads == [("wq", [0, 0], [4, 2]), ("wq", [4, 0], [4, 2])]


def test_a_stack_becomes_its_tensors(tmp_path):
    stack = torch.arange(12.0).view(3, 2, 2)
    written(tmp_path / "c", Tensors(w=stack), foreign={"w": Foreign(name="experts", stack=("e.0", "e.1", "e.2"))})
    found = read(tmp_path / "c")
    assert list(found) == ["e.0", "e.1", "e.2"]
    assert all(torch.equal(found[f"e.{number}"], stack[number]) for number in range(3))


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_numbers_are_cast(tmp_path, name):
    written(tmp_path / "c", Tensors(a=A / 3, b=B), dtype=name)
    found, dtype = read(tmp_path / "c"), getattr(torch, name)
    assert torch.equal(found["a"], (A / 3).to(dtype))
    assert {tensor.dtype for tensor in found.values()} == {dtype}


def test_numbers_that_the_format_makes_infinite_are_refused(tmp_path):
    with pytest.raises(ConfigError) as caught:
        written(tmp_path / "c", Tensors(a=torch.tensor([1.0, 70000.0])), dtype="float16")
    assert str(caught.value) == "--dtype=float16: a has numbers beyond its 65,504; try bfloat16"
    # What is infinite already stays so.
    infinite = torch.tensor([float("inf"), float("-inf"), 65504.0])
    written(tmp_path / "d", Tensors(a=infinite), dtype="float16")
    assert torch.equal(read(tmp_path / "d")["a"], infinite.half())


def test_a_tensor_without_elements_is_written(tmp_path):
    written(tmp_path / "c", Tensors(a=torch.zeros(0, 3)))
    assert read(tmp_path / "c")["a"].shape == (0, 3)
