"""The reader of folders of DCP: what torch wrote is read, damage is one line, and no code of a file runs."""

from __future__ import annotations

import io
import os

import pytest
import torch
import torch.distributed.checkpoint as dcp

from titanlab.checkpoint import DamagedCheckpoint, read_into, set_in
from titanlab.train.dcp_folder import read_saved
from titanlab.train.dcp_tensors import DcpPlanner, DcpReader

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")


def made(folder, state):
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    return DcpReader(folder, read_saved(folder, "run"), "run")


def refusal(reader, state):
    with pytest.raises(DamagedCheckpoint) as caught:
        read_into(state, reader, reader.read_metadata())
    assert "\n" not in str(caught.value)
    return str(caught.value)


class Payload:
    """Unpickled, it makes a folder."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_the_metadata_is_torch_s(tmp_path):
    reader = made(tmp_path, {"x": torch.arange(6.0).view(2, 3), "n": 5})
    ours, theirs = reader.read_metadata(), dcp.FileSystemReader(tmp_path).read_metadata()
    assert ours.state_dict_metadata.keys() == theirs.state_dict_metadata.keys()
    assert ours.state_dict_metadata["x"].size == torch.Size([2, 3])
    assert ours.state_dict_metadata["x"].properties.dtype == torch.float32
    assert ours.state_dict_metadata["x"].chunks == theirs.state_dict_metadata["x"].chunks
    assert ours.storage_data.keys() == theirs.storage_data.keys()
    assert ours.version == theirs.version


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_tensors_and_values_come_back(tmp_path, dtype, shape):
    tensor = torch.ones(shape).to(dtype)
    reader = made(tmp_path, {"x": tensor, "n": {"a": 5}})
    state = {"x": torch.zeros(shape).to(dtype), "n.a": 0}
    read_into(state, reader, reader.read_metadata())
    assert torch.equal(state["x"], tensor)
    assert state["n.a"] == 5


def test_damaged_bytes_are_one_line(tmp_path):
    reader = made(tmp_path, {"x": torch.ones(3)})
    for path in tmp_path.glob("*.distcp"):
        path.write_bytes(b"x" * path.stat().st_size)
    said = refusal(reader, {"x": torch.zeros(3)})
    assert "a file is damaged, or asks for more than tensors" in said


def test_a_missing_file_is_named(tmp_path):
    reader = made(tmp_path, {"x": torch.ones(3)})
    for path in tmp_path.glob("*.distcp"):
        path.unlink()
    assert "cannot be read (it has no file __0_0.distcp)" in refusal(reader, {"x": torch.zeros(3)})


def test_code_in_a_file_does_not_run(tmp_path):
    (tmp_path / "c").mkdir()
    reader = made(tmp_path / "c", {"n": Payload(tmp_path / "ran")})
    assert "asks for more than tensors" in refusal(reader, {"n": 0})
    assert not (tmp_path / "ran").exists()


def test_an_error_of_the_disk_is_no_damage(tmp_path, monkeypatch):
    reader = made(tmp_path, {"x": torch.ones(3)})

    def fails(self, plan, planner):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(dcp.FileSystemReader, "read_data", fails)
    with pytest.raises(OSError, match="Input/output error"):
        reader.read_data(None, DcpPlanner())


@pytest.mark.parametrize("kind", [MemoryError, torch.OutOfMemoryError])
def test_want_of_memory_is_no_damage(tmp_path, monkeypatch, kind):
    reader = made(tmp_path, {"x": torch.ones(3)})

    def fails(self, plan, planner):
        raise kind("x")

    monkeypatch.setattr(dcp.FileSystemReader, "read_data", fails)
    with pytest.raises(kind):
        reader.read_data(None, DcpPlanner())


def test_a_value_is_set_where_its_path_leads():
    state = {"a": [{"b": 1}, 2], "c": 3}
    set_in(state, ("a", 0, "b"), 7)
    set_in(state, ("a", 1), io)
    set_in(state, ("c",), None)
    assert state == {"a": [{"b": 7}, io], "c": None}
    with pytest.raises(KeyError):
        set_in(state, ("no", "b"), 1)
