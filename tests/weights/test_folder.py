"""Weights in files: any box of a tensor, and each damage of a weights folder in one line."""

from __future__ import annotations

import dataclasses
import json
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests.refusals import refusal
from titanlab.techniques.model.contract import Foreign
from titanlab.techniques.model.llama_schema import Llama, Mixtral
from titanlab.train import weights as module
from titanlab.train.weights import (
    SafetensorsSource,
    TensorEntry,
    biases_of,
    in_pairs,
    indexed_files,
    open_weights,
    read_entries,
)

SIZES = {"dim": 16, "layers": 1, "heads": 2, "kv_heads": 1, "ffn_dim": 24, "vocab_size": 32}
MODEL = Llama(**SIZES)
PLAIN = dataclasses.asdict(MODEL)


def source_of(folder, tensors, foreign):
    """A source of tensors that are written to one file."""
    path = folder / "model.safetensors"
    save_file(tensors, path)
    places = {name: (path, name) for name in tensors}
    return SafetensorsSource(model=None, entries={}, places=places, foreign=foreign)


@given(
    first=st.integers(0, 11),
    size=st.integers(0, 12),
    column=st.integers(0, 2),
    width=st.integers(0, 3),
    head=st.sampled_from([0, 4]),
)
def test_any_box_of_a_tensor_is_read_in_our_order_of_rows(tmp_path_factory, first, size, column, width, head):
    size, width = min(size, 12 - first), min(width, 3 - column)
    tensor = torch.arange(36.0).view(12, 3)
    source = source_of(tmp_path_factory.mktemp("box"), {"q": tensor}, {"wq": Foreign(name="q", head=head)})
    expected = in_pairs(tensor, head) if head else tensor
    box = source.read("wq", [first, column], [size, width])
    assert torch.equal(box, expected[first : first + size, column : column + width])


@given(
    shape=st.lists(st.integers(0, 9), min_size=1, max_size=3), rows=st.sampled_from([1, 2, 4]), most=st.integers(1, 99)
)
def test_a_tensor_is_cut_into_bounded_boxes_of_whole_heads(shape, rows, most):
    shape = (shape[0] * rows, *shape[1:])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK_BYTES", most)
        found = list(TensorEntry(dtype="F32", shape=shape).chunks(rows=rows))
    width = 4 * torch.Size(shape[1:]).numel()
    at = 0
    for offsets, sizes in found:
        assert (offsets, sizes[1:]) == ([at, *[0] * (len(shape) - 1)], list(shape[1:]))
        # The rows of one head are never cut, even if they are more than the most.
        assert sizes[0] % rows == 0
        assert sizes[0] == rows or sizes[0] * width <= most
        at += sizes[0]
    assert at == shape[0]


def test_a_file_that_lacks_a_tensor_of_the_index_is_one_line(tmp_path):
    file = tmp_path / "1.safetensors"
    save_file({"a": torch.zeros(2)}, file)
    said = f"x={file}: lacks b, which the index places in it; fetch the folder again, whole"
    assert refusal(read_entries, {file: ["a", "b"]}, "x") == said


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (None, "is missing; fetch the file again"),
        (b"\x02\0\0\0\0\0\0\0[]", "cannot be read ("),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\n", "is a pointer of Git LFS, and not the file;"),
        ("a pipe", "is not a regular file; fetch the file again"),
    ],
)
def test_a_damaged_file_is_one_line(tmp_path, content, rule):
    path = tmp_path / "model.safetensors"
    if content == "a pipe":
        # To open it for reading would wait for a writer.
        os.mkfifo(path)
    elif content is not None:
        path.write_bytes(content)
    assert refusal(read_entries, {path: None}, "init_from").startswith(f"init_from={path}: {rule}")


def made(folder, **changed):
    """A folder of weights with a manifest that is changed; a value of ... is left out."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    shapes = MODEL.account().parameters
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(tensors, folder / "weights.safetensors")
    manifest = {"schema": 1, "model": PLAIN, "about": {"bos_token_id": 1}, "digest": "ab", **changed}
    content = {key: value for key, value in manifest.items() if value is not ...}
    (folder / "weights.json").write_text(json.dumps(content))
    return tensors


UNUSABLE = "its weights.json cannot be used ("
DAMAGED = {
    "no model": ({"model": ...}, f"{UNUSABLE}KeyError: 'model'"),
    "no digest": ({"digest": ...}, f"{UNUSABLE}KeyError: 'digest'"),
    "another schema": ({"schema": 2}, f"{UNUSABLE}ValueError: another version of titanlab wrote it"),
    "a model of text": ({"model": "llama"}, f"{UNUSABLE}TypeError: "),
    "a model without a kind": ({"model": {"dim": 4}}, f"{UNUSABLE}KeyError: 'kind'"),
    "half a layer": ({"model": {**PLAIN, "layers": 1.5}}, f"{UNUSABLE}TypeError: layers is not a whole number: 1.5"),
    "a layer of true": ({"model": {**PLAIN, "layers": True}}, f"{UNUSABLE}TypeError: layers is not a whole number"),
    "an unknown size": ({"model": {**PLAIN, "size": 4}}, f"{UNUSABLE}TypeError: "),
    "a context of text": ({"about": {"max_position_embeddings": "x"}}, f"{UNUSABLE}ValueError: max_position_embeddings"),
    "an about of text": ({"about": "x"}, f"{UNUSABLE}ValueError: "),
    "biases of a number": ({"biases": 5}, f"{UNUSABLE}TypeError: "),
    "a bias of text": ({"biases": {"layers.0": ["x"]}}, f"{UNUSABLE}ValueError: "),
    "a bias that is NaN": ({"biases": {"layers.0": [float("nan")]}}, f"{UNUSABLE}ValueError: a bias is not finite"),
    "a number that no float holds": ({"biases": {"layers.0": [10**400]}}, "cannot be read (a number in it is larger than"),
    "another model": ({"model": {**PLAIN, "vocab_size": 33}}, "its config and its tensors disagree: "),
    "a model that is not installed": ({"model": {"kind": "no_such"}}, "no_such"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_manifest_is_one_line(tmp_path, name):
    changed, reason = DAMAGED[name]
    made(tmp_path, **changed)
    assert reason in refusal(open_weights, tmp_path, "x")


@pytest.mark.parametrize(
    "places", [{}, ["a"], {"x": 5}, {"x": "a", "y": ["a"]}, {"x": "../a"}, {"x": "/a"}, {"x": None}]
)
def test_an_index_of_other_files_is_refused(tmp_path, places):
    (tmp_path / "a").write_text("")
    (tmp_path / "index.json").write_text(json.dumps({"weight_map": places}))
    said = refusal(indexed_files, tmp_path, "index.json", "one", "k")
    assert said == f"k={tmp_path}/index.json: names no files of this folder; fetch the file again"


BIASED = Mixtral(**{**SIZES, "layers": 2}, experts=4, active_experts=2, balance="bias")
GIVEN = {"layers.0": [0.0, 0.1, -0.2, 0.0], "layers.1": [0.0] * 4}


@pytest.mark.parametrize(
    "routing", [{"layers.0": [0.0] * 4}, {**GIVEN, "layers.2": [0.0] * 4}, {**GIVEN, "layers.1": [0.0] * 3}]
)
def test_biases_of_another_model_are_one_line(routing):
    rule = "its biases are not those of 2 blocks of 4 experts"
    said = f"k=folder: {rule}; choose the model that it was trained as"
    assert refusal(biases_of, BIASED, routing, "k", "folder") == said


def test_the_format_of_most_tensors_is_the_usual_one():
    for dtypes in (["F32", "BF16", "BF16"], ["F16", "BF16"], ["BF16", "F16"]):
        entries = {str(number): TensorEntry(dtype=dtype, shape=()) for number, dtype in enumerate(dtypes)}
        assert SafetensorsSource(model=None, entries=entries, places={}, foreign={}).usual_dtype == "bfloat16"
