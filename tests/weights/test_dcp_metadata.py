"""`.metadata` of a folder of DCP: what torch has written is read, and values that it never writes are named."""

from __future__ import annotations

import os
import pickle
from pathlib import Path, PosixPath

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from titanlab.checkpoint import ITEM_BYTES, DamagedCheckpoint
from titanlab.train import dcp_folder
from titanlab.train.dcp_folder import SavedPlace, SavedTensor, read_saved


def tensor(size=(4, 2), *boxes, dtype=torch.float32):
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype),
        size=torch.Size(size),
        chunks=[ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes],
    )


HALVES = [((0, 0), (2, 2)), ((2, 0), (2, 2))]


def of(entries=None, places=None, **more):
    entries = {"x": tensor((4, 2), *HALVES), "n": BytesStorageMetadata()} if entries is None else entries
    places = {
        MetadataIndex("x", torch.Size([2, 0]), 1): _StorageInfo("__0_0.distcp", 5, 16),
        MetadataIndex("n"): _StorageInfo("__0_1.distcp", 0, 9),
    } if places is None else places  # fmt: skip
    return Metadata(state_dict_metadata=entries, storage_data=places, **more)


def read(folder, found):
    (folder / ".metadata").write_bytes(found if isinstance(found, bytes) else pickle.dumps(found))
    return read_saved(folder, "run")


def refusal(folder, found):
    with pytest.raises(DamagedCheckpoint) as caught:
        read(folder, found)
    text = str(caught.value)
    before, after = (
        f"run={folder}: its .metadata ",
        "; give a checkpoint that titanlab has saved, from a source that you trust",
    )
    assert text.startswith(before)
    assert text.endswith(after)
    return text.removeprefix(before).removesuffix(after)


def test_what_torch_writes_is_read(tmp_path):
    meta = StorageMeta(checkpoint_id=PosixPath("/where/it/was"), save_id="a", load_id=None)
    saved = read(tmp_path, of(planner_data={"x": ("model", "x")}, storage_meta=meta, version="1.0.0"))
    assert saved.tensors == {"x": SavedTensor(dtype="float32", size=(4, 2), boxes=tuple(HALVES))}
    assert saved.objects == {"n"}
    assert saved.version == "1.0.0"
    assert saved.places == {
        ("x", (2, 0), 1): SavedPlace(relative_path="__0_0.distcp", offset=5, length=16),
        ("n", None, None): SavedPlace(relative_path="__0_1.distcp", offset=0, length=9),
    }


def test_an_empty_one_is_read(tmp_path):
    saved = read(tmp_path, of({}, {}))
    assert (saved.tensors, saved.objects, saved.places) == ({}, frozenset(), {})


@pytest.mark.parametrize("name", ITEM_BYTES)
def test_every_dtype_is_read(tmp_path, name):
    saved = read(tmp_path, of({"s": tensor((), ((), ()), dtype=getattr(torch, name))}, {}))
    assert saved.tensors == {"s": SavedTensor(dtype=name, size=(), boxes=(((), ()),))}


def entry(value):
    return lambda: of({"x": value}, {})


def place(*given, **more):
    return lambda: of(None, {MetadataIndex("x"): _StorageInfo(*given, **more)})


def properties(value):
    found = tensor()
    found.properties = value
    return found


BROKEN = {
    "a list": (list, "Metadata"),
    "another object": (lambda: torch.Size([1]), "Metadata"),
    "no mapping": (lambda: of([]), "a mapping"),
    "no places": (lambda: Metadata({}, storage_data=None), "a mapping"),
    "a name of a number": (lambda: of({5: BytesStorageMetadata()}, {}), "a text"),
    "a tensor of text": (entry("x"), "TensorStorageMetadata"),
    "a size of a list": (entry(TensorStorageMetadata(TensorProperties(), [4, 2], [])), "a size"),
    "a size of true": (entry(TensorStorageMetadata(TensorProperties(), (True,), [])), "a size"),
    "no chunks": (entry(TensorStorageMetadata(TensorProperties(), torch.Size([4]), None)), "a list of chunks"),
    "a chunk of text": (entry(TensorStorageMetadata(TensorProperties(), torch.Size([4]), ["x"])), "ChunkStorageMetadata"),
    "a chunk of one dim": (entry(tensor((4, 2), ((0,), (2,)))), "a chunk of its tensor's dimensions"),
    "a chunk outside": (entry(tensor((4,), ((3,), (2,)))), "a chunk inside of its tensor"),
    "properties of text": (entry(properties("float32")), "properties of a tensor"),
    "a place of text": (lambda: of(None, {MetadataIndex("x"): "y"}), "_StorageInfo"),
    "an index of text": (lambda: of(None, {"x": _StorageInfo("a", 0, 1)}), "MetadataIndex"),
    "a file outside": (place("../a", 0, 1), "the name of a file beside it"),
    "a file of the root": (place("/etc/passwd", 0, 1), "the name of a file beside it"),
    "the folder": (place(".", 0, 1), "the name of a file beside it"),
    "the folder above": (place("..", 0, 1), "the name of a file beside it"),
    "no name": (place("", 0, 1), "the name of a file beside it"),
    "a null": (place("a\0", 0, 1), "the name of a file beside it"),
    "a file of a number": (place(5, 0, 1), "a text"),
    "a negative offset": (place("a", -1, 1), "a count"),
    "an offset of 2**63": (place("a", 2**63, 1), "a count"),
    "a length of true": (place("a", 0, True), "a count"),
    "compressed bytes": (place("a", 0, 1, transform_descriptors=["zstd"]), "bytes that are not compressed"),
    "a version of a number": (lambda: of(version=3), "a text"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_value_that_torch_never_writes_is_named(tmp_path, name):
    make, wanted = BROKEN[name]
    assert refusal(tmp_path, make()) == f"is damaged (it lacks {wanted})"


def test_a_list_of_chunks_that_many_share_is_refused(tmp_path):
    shared = tensor((4, 2), *HALVES * 50)
    few = of({f"x{number}": shared for number in range(5)}, {})
    assert len(read(tmp_path, few).tensors) == 5
    many = of({f"x{number}": shared for number in range(500)}, {})
    assert refusal(tmp_path, many) == "is damaged (it has more chunks than bytes)"


class Payload:
    """Unpickled, it makes a folder."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("make", [lambda bad: bad, lambda bad: of(planner_data=bad), lambda bad: of({"x": bad}, {})])
def test_nothing_in_it_runs(tmp_path, make):
    said = refusal(tmp_path, make(Payload(tmp_path / "ran")))
    assert said == "asks for posix.mkdir, which could run code"
    assert [path.name for path in tmp_path.iterdir()] == [".metadata"]


def test_what_is_no_file_is_refused(tmp_path, monkeypatch):
    with pytest.raises(DamagedCheckpoint, match=r"its \.metadata is missing;"):
        read_saved(tmp_path, "run")
    (tmp_path / ".metadata").mkdir()
    with pytest.raises(DamagedCheckpoint, match=r"its \.metadata is no file;"):
        read_saved(tmp_path, "run")
    (tmp_path / ".metadata").rmdir()
    content = pickle.dumps(of())
    monkeypatch.setattr(dcp_folder, "MOST_BYTES", len(content))
    read(tmp_path, content)
    monkeypatch.setattr(dcp_folder, "MOST_BYTES", len(content) - 1)
    assert refusal(tmp_path, content) == f"has {len(content)} bytes, and {len(content) - 1} are the most"


def test_a_file_that_cannot_be_read_is_said(tmp_path, monkeypatch):
    def denied(path):
        raise PermissionError(13, "Permission denied")

    (tmp_path / ".metadata").write_bytes(b"")
    monkeypatch.setattr(Path, "read_bytes", denied)
    with pytest.raises(DamagedCheckpoint, match=r"its \.metadata cannot be read \(Permission denied\);"):
        read_saved(tmp_path, "run")
