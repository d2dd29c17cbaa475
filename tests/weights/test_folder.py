"""A weights folder: what is read of it, and each damage in one line."""

from __future__ import annotations

import dataclasses
import json
import os

import pytest
import torch
from safetensors.torch import save_file

from titanlab.errors import ConfigError
from titanlab.techniques.model.llama_schema import Llama
from titanlab.train.weights_folder import indexed_files, is_weights_folder, model_of, open_weights, read_object

MODEL = Llama(dim=16, layers=1, heads=2, kv_heads=1, ffn_dim=24, vocab_size=32)


def made(folder, **changed):
    """A folder of weights with a manifest that is changed; a value of ... is left out."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    shapes = MODEL.account().parameters
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(tensors, folder / "weights.safetensors")
    manifest = {
        "schema": 1,
        "model": dataclasses.asdict(MODEL),
        "about": {"bos_token_id": 1},
        "digest": "ab",
        **changed,
    }
    content = {key: value for key, value in manifest.items() if value is not ...}
    (folder / "weights.json").write_text(json.dumps(content))
    return tensors


def refusal(action, *given):
    with pytest.raises(ConfigError) as caught:
        action(*given)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_folder_with_a_manifest_is_one(tmp_path):
    assert not is_weights_folder(tmp_path)
    (tmp_path / "weights.json").mkdir()
    assert not is_weights_folder(tmp_path)
    made(tmp_path / "w")
    assert is_weights_folder(tmp_path / "w")


def test_its_weights_are_opened(tmp_path):
    tensors = made(tmp_path)
    source = open_weights(tmp_path, "x")
    assert (source.model, source.about, source.digest) == (MODEL, {"bos_token_id": 1}, "ab")
    assert (source.biases, source.copies) == ({}, {})
    assert list(source.entries) == list(MODEL.account().parameters)
    for name, tensor in tensors.items():
        assert torch.equal(source.read(name, [0] * tensor.ndim, tensor.shape), tensor)


def test_a_manifest_may_say_nothing_more_of_the_model(tmp_path):
    made(tmp_path, about=...)
    assert open_weights(tmp_path, "x").about == {}


DAMAGED = {
    "no model": ({"model": ...}, "KeyError: 'model'"),
    "no digest": ({"digest": ...}, "KeyError: 'digest'"),
    "no schema": ({"schema": ...}, "KeyError: 'schema'"),
    "another schema": ({"schema": 2}, "ValueError: another version of titanlab's"),
    "a model of text": ({"model": "llama"}, "TypeError: "),
    "a model without a kind": ({"model": {"dim": 4}}, "KeyError: 'kind'"),
    "half a layer": ({"model": {**dataclasses.asdict(MODEL), "layers": 1.5}}, "TypeError: layers is no whole number: 1.5"),
    "a layer of true": ({"model": {**dataclasses.asdict(MODEL), "layers": True}}, "TypeError: layers is no whole number"),
    "a size without end": ({"model": {**dataclasses.asdict(MODEL), "dim": 1e400}}, "TypeError: dim is no whole number"),
    "a context of text": ({"about": {"max_position_embeddings": "x"}}, "ValueError: max_position_embeddings is no "),
    "an unknown size": ({"model": {**dataclasses.asdict(MODEL), "size": 4}}, "TypeError: "),
    "an about of text": ({"about": "x"}, "ValueError: "),
    "biases of a number": ({"biases": 5}, "TypeError: "),
    "a bias of text": ({"biases": {"layers.0": ["x"]}}, "ValueError: "),
    "a bias that is no number": ({"biases": {"layers.0": [float("nan")]}}, "ValueError: a bias is not finite"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_manifest_is_one_line(tmp_path, name):
    changed, reason = DAMAGED[name]
    made(tmp_path, **changed)
    said = refusal(open_weights, tmp_path, "x")
    assert said.startswith(f"x={tmp_path}: its weights.json cannot be used ({reason}")
    assert said.endswith("; import the weights again")


def test_a_number_that_no_float_holds_is_one_line(tmp_path):
    made(tmp_path, biases={"layers.0": [10**400]})
    said = refusal(open_weights, tmp_path, "x")
    assert said == (
        f"x={tmp_path}/weights.json: cannot be read (a number in it is larger than any float); fetch the file again"
    )


def test_a_kind_of_model_that_is_not_installed_is_one_line(tmp_path):
    made(tmp_path, model={"kind": "no_such"})
    assert "no_such" in refusal(open_weights, tmp_path, "x")


def test_tensors_of_another_model_are_refused(tmp_path):
    made(tmp_path, model=dataclasses.asdict(dataclasses.replace(MODEL, vocab_size=33)))
    assert "its config and its tensors disagree: " in refusal(open_weights, tmp_path, "x")


def test_a_folder_without_its_tensors_is_refused(tmp_path):
    made(tmp_path)
    (tmp_path / "weights.safetensors").unlink()
    assert refusal(open_weights, tmp_path, "x") == f"x={tmp_path}/weights.safetensors: is missing; fetch the file again"


def test_a_pipe_in_place_of_the_tensors_is_refused(tmp_path):
    """To open it for reading would wait for a writer."""
    made(tmp_path)
    (tmp_path / "weights.safetensors").unlink()
    os.mkfifo(tmp_path / "weights.safetensors")
    said = f"x={tmp_path}/weights.safetensors: is no regular file; fetch the file again"
    assert refusal(open_weights, tmp_path, "x") == said


def test_a_model_is_made_of_plain_values():
    assert model_of(dataclasses.asdict(MODEL)) == MODEL
    with pytest.raises(KeyError):
        model_of({})
    with pytest.raises(TypeError):
        model_of({"kind": "llama", "no_such": 1})
    with pytest.raises(ConfigError):
        model_of({"kind": "no_such"})


def test_without_an_index_there_is_one_file(tmp_path):
    assert indexed_files(tmp_path, "index.json", "one.safetensors", "x") == {tmp_path / "one.safetensors": None}


def test_the_single_file_counts_beside_an_index(tmp_path):
    """Whoever saves a model again into one file leaves the index and the files of an earlier save."""
    for name in ("a", "one"):
        (tmp_path / name).write_text("")
    (tmp_path / "index.json").write_text(json.dumps({"weight_map": {"x": "a"}}))
    assert indexed_files(tmp_path, "index.json", "one", "k") == {tmp_path / "one": None}
    (tmp_path / "a").unlink()
    assert indexed_files(tmp_path, "index.json", "one", "k") == {tmp_path / "one": None}


def test_the_files_of_an_index_are_each_named_once(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_text("")
    (tmp_path / "index.json").write_text(json.dumps({"weight_map": {"x": "b", "y": "a", "z": "b"}}))
    assert indexed_files(tmp_path, "index.json", "one", "k") == {tmp_path / "a": ["y"], tmp_path / "b": ["x", "z"]}
    (tmp_path / "a").unlink()
    said = "names 2 files, and 1 are missing: a; fetch the folder again, whole"
    assert refusal(indexed_files, tmp_path, "index.json", "one", "k") == f"k={tmp_path}/index.json: {said}"


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"weight_map": {}},
        {"weight_map": ["a"]},
        {"weight_map": {"x": 5}},
        {"weight_map": {"x": ["a"]}},
        {"weight_map": {"x": "a", "y": 5}},
        {"weight_map": {"x": "../a"}},
        {"weight_map": {"x": "/a"}},
        {"weight_map": {"x": "b/a"}},
        {"weight_map": {"x": None}},
    ],
)
def test_an_index_of_other_files_is_refused(tmp_path, content):
    (tmp_path / "a").write_text("")
    (tmp_path / "index.json").write_text(json.dumps(content))
    said = refusal(indexed_files, tmp_path, "index.json", "one", "k")
    assert said == f"k={tmp_path}/index.json: names no files of this folder; fetch the file again"


@pytest.mark.parametrize("name", ["..", ".", "", "a\0"])
def test_a_name_of_no_file_is_missing_or_none(tmp_path, name):
    (tmp_path / "index.json").write_text(json.dumps({"weight_map": {"x": name}}))
    said = refusal(indexed_files, tmp_path, "index.json", "one", "k")
    assert "names no files of this folder" in said or "and 1 are missing" in said


def test_an_object_is_read(tmp_path):
    (tmp_path / "a.json").write_text('{"é": [1]}', encoding="utf-8")
    assert read_object(tmp_path / "a.json", "x") == {"é": [1]}


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (b"", "cannot be read ("),
        (b"{", "cannot be read ("),
        (b"\xff", "cannot be read ("),
        (b"[" * 100_000, "cannot be read ("),
        (b"1" * 5000, "cannot be read ("),
        (b"[]", "holds no JSON object;"),
        (b"null", "holds no JSON object;"),
    ],
)
def test_what_is_no_object_is_one_line(tmp_path, content, rule):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    assert refusal(read_object, path, "x").startswith(f"x={path}: {rule}")


def test_a_file_that_is_missing_or_a_folder_is_one_line(tmp_path):
    said = refusal(read_object, tmp_path / "a.json", "x")
    assert said == f"x={tmp_path}: has no a.json; name a folder that has one"
    (tmp_path / "a.json").mkdir()
    assert "cannot be read (" in refusal(read_object, tmp_path / "a.json", "x")
