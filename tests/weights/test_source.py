"""Sources of tensors: any box of a file, the order of rows, and what is refused before a tensor is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from titanlab.errors import ConfigError
from titanlab.techniques.model.contract import Foreign
from titanlab.train import weights_folder as module
from titanlab.train.weights_folder import (
    CHUNK_BYTES,
    SafetensorsSource,
    TensorEntry,
    check_entries,
    chunks,
    in_halves,
    in_pairs,
    read_entries,
    usual_dtype,
)

HERE = Path("here")


def source_of(folder, tensors, foreign):
    """A source of tensors that are written to one file."""
    path = folder / "model.safetensors"
    save_file(tensors, path)
    return SafetensorsSource(model=None, entries={}, files=dict.fromkeys(tensors, path), foreign=foreign)


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes"),
    [("F32", (3, 2), 24), ("BF16", (5,), 10), ("F16", (), 2), ("F32", (0, 7), 0), ("BF16", (2**20, 2**20), 2**41)],
)
def test_the_size_of_a_tensor(dtype, shape, nbytes):
    assert TensorEntry(dtype=dtype, shape=shape).nbytes == nbytes


def test_any_box_of_a_tensor_is_read(tmp_path):
    tensor = torch.arange(24.0).view(4, 3, 2)
    source = source_of(tmp_path, {"theirs": tensor}, {"ours": Foreign(name="theirs")})
    for first, size in [(0, 4), (1, 2), (3, 1), (2, 0)]:
        box = source.read("ours", [first, 1, 0], [size, 2, 1])
        assert torch.equal(box, tensor[first : first + size, 1:3, :1])


@given(first=st.integers(0, 11), size=st.integers(0, 12), column=st.integers(0, 2), width=st.integers(0, 3))
def test_any_box_of_a_tensor_with_other_rows_is_read(tmp_path_factory, first, size, column, width):
    size, width = min(size, 12 - first), min(width, 3 - column)
    tensor = torch.arange(36.0).view(12, 3)
    source = source_of(tmp_path_factory.mktemp("box"), {"q": tensor}, {"wq": Foreign(name="q", head=4)})
    box = source.read("wq", [first, column], [size, width])
    assert torch.equal(box, in_pairs(tensor, 4)[first : first + size, column : column + width])


def test_a_stack_of_tensors_is_one(tmp_path):
    experts = {f"expert.{number}": torch.full((2, 3), float(number)) for number in range(4)}
    source = source_of(tmp_path, experts, {"w": Foreign(name="experts", stack=tuple(experts))})
    whole = torch.stack(list(experts.values()))
    assert torch.equal(source.read("w", [0, 0, 0], [4, 2, 3]), whole)
    assert torch.equal(source.read("w", [1, 1, 0], [2, 1, 2]), whole[1:3, 1:, :2])
    assert source.read("w", [4, 0, 0], [0, 2, 3]).shape == (0, 2, 3)


def test_rows_are_put_in_pairs_and_back():
    rows = torch.arange(8.0).view(8, 1)
    assert in_pairs(rows, 4).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert in_halves(rows, 4).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert in_pairs(rows, 8).flatten().tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert in_halves(rows, 8).flatten().tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert torch.equal(in_halves(in_pairs(rows, 8), 8), rows)
    assert in_pairs(torch.arange(4), 4).tolist() == [0, 2, 1, 3]


def test_the_format_of_most_tensors_is_the_usual_one():
    def of(*dtypes):
        entries = {str(number): TensorEntry(dtype=dtype, shape=()) for number, dtype in enumerate(dtypes)}
        return usual_dtype(SafetensorsSource(model=None, entries=entries, files={}, foreign={}))

    assert of("F32") == "float32"
    assert of("F32", "BF16", "BF16") == "bfloat16"
    # Of as many tensors in both, always the same.
    assert of("F16", "BF16") == of("BF16", "F16") == "bfloat16"


@pytest.mark.parametrize(
    ("shape", "rows", "most", "expected"),
    [
        ((4, 2), 1, 16, [([0, 0], [2, 2]), ([2, 0], [2, 2])]),
        ((5, 2), 1, 16, [([0, 0], [2, 2]), ([2, 0], [2, 2]), ([4, 0], [1, 2])]),
        ((3,), 1, 100, [([0], [3])]),
        ((0, 2), 1, 16, []),
        ((2, 0), 1, 16, [([0, 0], [2, 0])]),
        # One row is more than the most.
        ((2, 9), 1, 16, [([0, 0], [1, 9]), ([1, 0], [1, 9])]),
        # So are the rows of a head.
        ((8, 2), 4, 16, [([0, 0], [4, 2]), ([4, 0], [4, 2])]),
        ((6, 1), 2, 20, [([0, 0], [4, 1]), ([4, 0], [2, 1])]),
        ((2, 3, 4), 1, 48, [([0, 0, 0], [1, 3, 4]), ([1, 0, 0], [1, 3, 4])]),
    ],
)
def test_a_tensor_is_cut_into_boxes_of_whole_rows(monkeypatch, shape, rows, most, expected):
    monkeypatch.setattr(module, "CHUNK_BYTES", most)
    assert list(chunks(TensorEntry(dtype="F32", shape=shape), rows=rows)) == expected


def test_pieces_are_whole_heads_and_bounded():
    entry = TensorEntry(dtype="BF16", shape=(128256, 16384))
    found = list(chunks(entry, rows=128))
    assert sum(sizes[0] for _, sizes in found) == 128256
    assert all(sizes[0] * 16384 * 2 <= CHUNK_BYTES and sizes[0] % 128 == 0 for _, sizes in found[:-1])
    assert [offsets[0] for offsets, _ in found][:2] == [0, found[0][1][0]]


def test_the_tensors_of_several_files_are_found(tmp_path):
    save_file({"a": torch.zeros(2, 3)}, tmp_path / "1.safetensors")
    save_file(
        {"b": torch.zeros(4, dtype=torch.bfloat16), "c": torch.zeros((), dtype=torch.int8)}, tmp_path / "2.safetensors"
    )
    entries, places = read_entries(dict.fromkeys([tmp_path / "1.safetensors", tmp_path / "2.safetensors"]), "x")
    assert entries == {
        "a": TensorEntry(dtype="F32", shape=(2, 3)), "b": TensorEntry(dtype="BF16", shape=(4,)), "c": TensorEntry(dtype="I8", shape=()),
    }  # fmt: skip
    assert {name: path.name for name, path in places.items()} == {
        "a": "1.safetensors", "b": "2.safetensors", "c": "2.safetensors",
    }  # fmt: skip
    assert read_entries({}, "x") == ({}, {})


def test_a_tensor_is_read_from_the_file_that_the_index_names(tmp_path):
    first, second = tmp_path / "1.safetensors", tmp_path / "2.safetensors"
    save_file({"a": torch.zeros(2), "b": torch.zeros(3)}, first)
    save_file({"a": torch.zeros(4), "c": torch.zeros(5)}, second)
    entries, places = read_entries({first: ["a"], second: ["c"]}, "x")
    assert {name: entry.shape for name, entry in entries.items()} == {"a": (2,), "c": (5,)}
    assert places == {"a": first, "c": second}
    with pytest.raises(ConfigError, match=f"x={second}: lacks b, which the index places in it; fetch the folder again"):
        read_entries({second: ["c", "b"]}, "x")


def test_a_pointer_of_git_lfs_is_named(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n")
    with pytest.raises(ConfigError, match="is a pointer of Git LFS, and not the file; run `git lfs pull`"):
        read_entries({path: None}, "x")


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (None, "is missing"),
        (b"", "cannot be read"),
        (b"\xff" * 100, "cannot be read"),
        (b"\x02\0\0\0\0\0\0\0[]", "cannot be read"),
    ],
)
def test_a_damaged_file_is_one_line(tmp_path, content, rule):
    path = tmp_path / "model.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_entries({path: None}, "init_from")
    text = str(caught.value)
    assert text.startswith(f"init_from={path}: {rule}")
    assert text.endswith("; fetch the file again")
    assert "\n" not in text


def test_a_folder_has_exactly_the_tensors_of_its_model():
    entries = {"a": TensorEntry(dtype="F32", shape=(2, 3)), "b": TensorEntry(dtype="BF16", shape=())}
    check_entries(HERE, "x", {"b": (), "a": (2, 3)}, entries)
    check_entries(HERE, "x", {}, {})


@pytest.mark.parametrize(
    ("expected", "said"),
    [
        ({"a": (2, 3)}, "b is a single number, not absent"),
        ({"a": (2, 3), "b": (), "c": (4,)}, "c is absent, not 4"),
        ({"a": (3, 2), "b": ()}, "a is 2×3, not 3×2"),
        ({"a": (2, 3, 1), "b": ()}, "a is 2×3, not 2×3×1"),
    ],
)
def test_a_tensor_that_does_not_fit_its_config_is_named(expected, said):
    entries = {"a": TensorEntry(dtype="F32", shape=(2, 3)), "b": TensorEntry(dtype="BF16", shape=())}
    with pytest.raises(ConfigError) as caught:
        check_entries(HERE, "x", expected, entries)
    assert str(caught.value) == f"x=here: its config and its tensors disagree: {said}; fetch the folder again, whole"


def test_quantised_weights_are_refused():
    with pytest.raises(
        ConfigError, match="^x=here: a is kept as I8, which is no format of plain weights; give weights in "
    ):
        check_entries(HERE, "x", {"a": (2,)}, {"a": TensorEntry(dtype="I8", shape=(2,))})
