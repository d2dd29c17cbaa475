"""The storage that writes: files of safetensors without a pickle, copies that stay, and errors of one rank."""

from __future__ import annotations

import json
import os
import pickle
import struct

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open

from tests.checkpoint.one_process import ALONE
from tests.checkpoint.storage import of_every_dtype, read, write
from titanlab.checkpoint.blocks import checksum
from titanlab.checkpoint.store import Plans, write_and_publish
from titanlab.checkpoint.writer import HostBuffer, publish
from titanlab.checkpoint.writer import write as write_file
from titanlab.distributed import World


def test_a_file_is_one_of_safetensors_in_which_each_dtype_is_one_range(tmp_path):
    state = {f"x.{number}": torch.full((3,), number, dtype=dtype) for number, dtype in enumerate(DTYPES * 3)}
    write(state, tmp_path / "c")
    path = tmp_path / "c" / "rank-00000.safetensors"
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == {f"{name}[0]" for name in state}
        assert all(torch.equal(file.get_tensor(f"{name}[0]"), tensor) for name, tensor in state.items())
    with path.open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    order = [entry["dtype"] for entry in sorted(header.values(), key=lambda entry: entry["data_offsets"])]
    assert order == [*["I64"] * 3, *["F32"] * 3, *["BF16"] * 3, *["U8"] * 3]


DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.int64)


def test_entries_that_are_no_tensors_are_json(tmp_path):
    state = {"a": {"step": 3, "name": "x", "rates": [0.5, None]}, "b": torch.ones(2)}
    write(state, tmp_path / "c")
    found = {"a": {"step": 0, "name": "", "rates": [0.0, 1.0]}, "b": torch.zeros(2)}
    read(found, tmp_path / "c")
    assert (found["a"], found["b"].tolist()) == ({"step": 3, "name": "x", "rates": [0.5, None]}, [1.0, 1.0])
    for value in (object(), float("nan"), 1 + 2j, {1, 2}):
        with pytest.raises(TypeError, match="^x is .*: a checkpoint holds tensors and values of JSON only$"):
            write({"x": value}, tmp_path / "d")


def test_staged_copies_do_not_change_with_the_model(tmp_path):
    state = {"x": torch.arange(10.0), "y": torch.arange(6).view(2, 3).t()}
    expected = {name: tensor.clone() for name, tensor in state.items()}
    planned = Plans().plan(state, tmp_path, ALONE)
    buffer = HostBuffer()
    buffer.reserve(3)
    staged = planned.stage(buffer)
    for tensor in state.values():
        tensor.zero_()
    write_and_publish(lambda: staged, planned, ALONE)
    read(state, tmp_path)
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_nothing_in_a_checkpoint_is_a_pickle(tmp_path):
    write(of_every_dtype(), tmp_path / "c")
    for path in (tmp_path / "c").iterdir():
        with pytest.raises((pickle.UnpicklingError, EOFError, ValueError, KeyError, IndexError, OverflowError)):
            pickle.loads(path.read_bytes())
        assert b"torch" not in path.read_bytes(), path.name


def fails_on_a_rank(folder, failing):
    """As a rank: write, while one rank's disk is full. Returns the error's text."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    world = World(rank=rank, world=size, local_rank=rank, device=torch.device("cpu"))
    planned = Plans().plan({"x": torch.ones(4)}, folder, world)
    if rank == failing:
        (folder / f"rank-{rank:05d}.safetensors").mkdir()
    try:
        write_and_publish(planned.stage, planned, world)
    except OSError as error:
        return type(error).__name__
    return "saved"


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_one_rank_is_one_of_all(pool, tmp_path, failing):
    assert pool.run(2, fails_on_a_rank, tmp_path, failing) == ["FileExistsError"] * 2
    assert not os.path.lexists(tmp_path / "index.json")


def of_json(**objects):
    """Save a state of plain values. Returns how they are staged."""
    planned = Plans().plan({"x": objects}, None, ALONE)
    return planned.stage()


def test_plain_values_are_staged_as_json():
    staged = of_json(number=3, text="é", none=None, rates=0.5)
    assert staged.objects == {"x.number": "3", "x.text": '"\\u00e9"', "x.none": "null", "x.rates": "0.5"}
    assert (list(staged.tensors), staged.content, list(staged.shard.chunks)) == ([], None, [])
    assert staged.shard.header == b"\x08\0\0\0\0\0\0\0{}      "


def test_what_was_written_is_what_is_there(tmp_path):
    staged = Plans().plan({"x": torch.arange(5.0), "n": 4}, tmp_path, ALONE).stage()
    # A folder that this host does not see yet.
    written = write_file(staged, tmp_path / "new" / "c")
    path = tmp_path / "new" / "c" / "rank-00000.safetensors"
    content = path.read_bytes()
    assert (written.file.name, written.file.size) == (path.name, len(content))
    assert written.file.checksums == checksum(content).to_bytes(8, "little")
    assert written.objects == {"n": "4"}
    # A second rank of the same number would write over it.
    with pytest.raises(FileExistsError):
        write_file(staged, tmp_path / "new" / "c")


def test_a_copy_is_one_range_of_the_given_memory():
    planned = Plans().plan({"x": torch.arange(3, dtype=torch.int16), "y": torch.ones(2)}, None, ALONE)
    buffer = HostBuffer()
    memory = buffer.reserve(4096)
    staged = planned.stage(buffer)
    assert staged.content.data_ptr() == memory.data_ptr()
    assert len(staged.content) == staged.shard.size
    content = bytes(staged.content.tolist())
    assert content == staged.shard.header + struct.pack("<2f3h", 1, 1, 0, 1, 2)
    assert [tensor.tolist() for tensor in staged.tensors] == [[1.0, 1.0], [0, 1, 2]]


def test_a_tensor_that_has_changed_since_the_plan_is_refused():
    plans = Plans()
    planned = plans.plan({"x": torch.ones(3)}, None, ALONE)
    planned.planner.state_dict["x"] = torch.ones(4)
    with pytest.raises(ValueError, match=r"^x has the shape \[4\], and the plan says \[3\]$"):
        planned.stage()


def test_the_index_is_written_last(tmp_path, monkeypatch):
    planned = Plans().plan({"x": torch.ones(3)}, tmp_path, ALONE)
    written = write_file(planned.stage(), tmp_path)
    names = []

    def fails_at_the_second(path, content, **given):
        names.append((path.name, given))
        if len(names) == 2:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("titanlab.checkpoint.storage.write_bytes", fails_at_the_second)
    with pytest.raises(OSError, match="No space left"):
        publish(tmp_path, planned.shards, [written], planned.position)
    assert names == [("position.json", {"durable": True}), ("index.json", {"durable": True})]
