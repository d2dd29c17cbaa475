"""Files of safetensors written in pieces: the library reads them, and a file that is not whole is an error."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from titanlab.train.weights_folder import TensorEntry
from titanlab.train.weights_tensors import SafetensorsWriter, index_of, split_in_files, torch_dtype


def of(**sizes):
    """Vectors of so many numbers of 4 bytes."""
    return {name: TensorEntry(dtype="F32", shape=(size,)) for name, size in sizes.items()}


def test_the_library_reads_what_was_written_in_pieces(tmp_path):
    x, y = torch.arange(6.0).view(3, 2), torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
    entries = {
        "x": TensorEntry(dtype="F32", shape=(3, 2)), "y": TensorEntry(dtype="BF16", shape=(2,)), "e": TensorEntry(dtype="F16", shape=(0, 4)),
    }  # fmt: skip
    path = tmp_path / "a.safetensors"
    with SafetensorsWriter(path, entries) as writer:
        assert bytes(writer.write(x[:1])) == b"\0\0\0\0\0\0\x80?"
        # Not contiguous, and two rows.
        writer.write(x.t().contiguous().t()[1:])
        writer.write(y)
    found = load_file(path)
    assert torch.equal(found["x"], x)
    assert torch.equal(found["y"], y)
    assert (found["e"].shape, found["e"].dtype) == ((0, 4), torch.float16)
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    header = int.from_bytes(path.read_bytes()[:8], "little")
    assert (header % 8, path.stat().st_size) == (0, 8 + header + 28)


def test_a_file_of_nothing_can_be_read(tmp_path):
    with SafetensorsWriter(tmp_path / "a", {}):
        pass
    assert load_file(tmp_path / "a") == {}


def test_a_file_that_is_not_whole_is_an_error(tmp_path):
    with (
        pytest.raises(RuntimeError, match=r"^8 bytes of .*a were not written$"),
        SafetensorsWriter(tmp_path / "a", of(x=3)) as writer,
    ):
        writer.write(torch.zeros(1))
    # An error that is under way says more.
    with pytest.raises(KeyError), SafetensorsWriter(tmp_path / "b", of(x=3)):
        raise KeyError


def test_a_file_that_is_there_is_not_touched(tmp_path):
    (tmp_path / "a").write_text("mine")
    with pytest.raises(FileExistsError):
        SafetensorsWriter(tmp_path / "a", {})
    assert (tmp_path / "a").read_text() == "mine"


@pytest.mark.parametrize(
    ("sizes", "most", "groups"),
    [
        ({"a": 1}, 100, [["a"]]),
        ({"a": 1, "b": 2}, 12, [["a", "b"]]),
        ({"a": 1, "b": 2}, 11, [["a"], ["b"]]),
        ({"a": 9, "b": 1, "c": 1}, 8, [["a"], ["b", "c"]]),
        ({"a": 1, "b": 9, "c": 1}, 8, [["a"], ["b"], ["c"]]),
        ({"a": 0, "b": 2, "c": 0}, 8, [["a", "b", "c"]]),
        ({"a": 5, "b": 5}, 1, [["a"], ["b"]]),
    ],
)
def test_tensors_are_shared_among_files_in_their_order(sizes, most, groups):
    files = split_in_files(of(**sizes), most=most, stem="w")
    assert list(files.values()) == groups
    count = len(groups)
    names = ["w.safetensors"] if count == 1 else [f"w-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    assert list(files) == names


def test_without_tensors_there_is_no_file():
    assert split_in_files({}, most=8, stem="w") == {}


def test_the_index_names_the_file_of_each_tensor():
    entries = of(a=1, b=2)
    files = split_in_files(entries, most=8, stem="w")
    assert index_of(entries, files) == {
        "metadata": {"total_size": 12},
        "weight_map": {"a": "w-00001-of-00002.safetensors", "b": "w-00002-of-00002.safetensors"},
    }


def test_formats_are_torchs():
    assert [torch_dtype(name) for name in ("F32", "BF16", "F16")] == [torch.float32, torch.bfloat16, torch.float16]
    with pytest.raises(KeyError):
        torch_dtype("I8")
