"""The storage: what DCP plans is written as safetensors with an index, and read back under any layout, block by block."""

import json
import os
import pickle
import struct

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from titanlab.checkpoint import blocks
from titanlab.checkpoint.blocks import BLOCK
from titanlab.checkpoint.index.format import ITEM_BYTES
from titanlab.checkpoint.index.reader import read_index
from titanlab.checkpoint.reader import JsonPlanner
from titanlab.checkpoint.savers.host_buffer import HostBuffer
from titanlab.checkpoint.savers.saving import Plans, write_and_publish
from titanlab.checkpoint.shard_reader import ShardReader
from titanlab.checkpoint.shards import bytes_of
from titanlab.checkpoint.writer import CheckpointWriter, SavePlannerOfJson
from titanlab.distributed.world import World

ALONE = World(rank=0, world=1, local_rank=0, device=torch.device("cpu"))


def write(state, folder, *, copies=False, world=ALONE):
    folder.mkdir(exist_ok=True)
    planned = Plans().plan(state, folder, world)
    staged = planned.stage(HostBuffer() if copies else None)
    write_and_publish(lambda: staged, planned.writer, world)


def read(state, folder):
    """Fill a state dict in this process. Returns the number of blocks that were read."""
    reader = ShardReader(folder, read_index(folder), "run")
    planner = JsonPlanner()
    planner.set_up_planner(state, reader.read_metadata(), is_coordinator=True)
    (made,) = planner.create_global_plan([planner.create_local_plan()])
    reader.read_data(planner.finish_plan(made), planner).wait()
    return reader.blocks_read


def same_bytes(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and bytes_of(one) == bytes_of(other)


def of_every_dtype():
    """Tensors of every dtype and of shapes that are easy to get wrong, with random bytes."""
    torch.manual_seed(0)
    state = {}
    for name, size in ITEM_BYTES.items():
        for shape in [(), (0,), (3, 0, 2), (5,), (3, 4)]:
            count = size * int(torch.tensor(shape).prod()) if shape else size
            raw = torch.randint(0, 2 if name == "bool" else 256, (count,), dtype=torch.uint8)
            state[f"{name} {list(shape)}"] = raw.view(getattr(torch, name)).view(shape)
    return state


@pytest.mark.parametrize("copies", [False, True])
def test_every_dtype_and_shape_comes_back_byte_for_byte(tmp_path, copies):
    state = of_every_dtype()
    write(state, tmp_path / "c", copies=copies)
    empty = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    read(empty, tmp_path / "c")
    assert [name for name in state if not same_bytes(state[name], empty[name])] == []
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == [
        "index.json", "position.json", "rank-00000.safetensors",
    ]  # fmt: skip


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
    write_and_publish(lambda: staged, planned.writer, ALONE)
    read(state, tmp_path)
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_a_part_reads_the_blocks_that_hold_it_and_no_others(tmp_path):
    rows = torch.arange(4 * BLOCK // 4, dtype=torch.float32).view(64, -1)
    # Another tensor before it, so that rows do not begin at blocks.
    write({"a": torch.zeros(100, dtype=torch.float64), "x": rows}, tmp_path / "c")
    assert read({"x": torch.empty_like(rows)}, tmp_path / "c") == 5
    assert read({"a": torch.zeros(100, dtype=torch.float64)}, tmp_path / "c") == 1
    # Another dtype is converted.
    converted = {"x": torch.empty(rows.shape, dtype=torch.float64)}
    assert read(converted, tmp_path / "c") == 5
    assert torch.equal(converted["x"], rows.double())


def _state(mesh, sharding, *, filled):
    """Two matrices of 6 MiB, a vector that two ranks cannot share equally, and an empty one."""
    shapes = {"rows": (1024, 1536), "columns": (1536, 1024), "odd": (3, 5), "replicated": (7,)}
    state = {}
    for number, (name, shape) in enumerate(shapes.items()):
        whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) + number
        whole = whole if filled else torch.full_like(whole, -1)
        state[name] = distribute_tensor(whole, mesh, [sharding.get(name, Replicate())])
    return state, shapes


SHARDINGS = {
    "rows": {"rows": Shard(0), "columns": Shard(0), "odd": Shard(0)},
    "columns": {"rows": Shard(1), "columns": Shard(1), "odd": Shard(1)},
    "none": {},
}


def resharded(folder, saves, loads):
    """As a rank: save under one sharding and load under another. Returns how often each block was read."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    world = World(rank=rank, world=size, local_rank=rank, device=torch.device("cpu"))
    if saves is not None:
        if rank == 0:
            folder.mkdir()
        world.share(None)
        write(_state(mesh, SHARDINGS[saves], filled=True)[0], folder, world=world)
    counts = {}
    original = blocks.BlockReader._read

    def counted(self, number, target):
        for block in range(number, number + blocks.blocks_of(len(target))):
            counts[self._name, block] = counts.get((self._name, block), 0) + 1
        original(self, number, target)

    blocks.BlockReader._read = counted
    try:
        state, _ = _state(mesh, SHARDINGS[loads], filled=False)
        reader = ShardReader(folder, read_index(folder), "run")
        dcp.load(state, storage_reader=reader, planner=JsonPlanner())
    finally:
        blocks.BlockReader._read = original
    expected, _ = _state(mesh, SHARDINGS[loads], filled=True)
    wrong = [name for name in state if not torch.equal(state[name].to_local(), expected[name].to_local())]
    assert reader.blocks_read == sum(counts.values())
    return wrong, max(counts.values()), len(counts)


@pytest.mark.parametrize("saves", list(SHARDINGS))
@pytest.mark.parametrize("loads", list(SHARDINGS))
def test_each_rank_reads_a_block_at_most_once_under_any_sharding(pool, tmp_path, saves, loads):
    folder = tmp_path / "c"
    for wrong, most, count in pool.run(2, resharded, folder, saves, loads):
        assert (wrong, most) == ([], 1)
        # 12 MiB in all; a rank of the same sharding needs its own half.
        assert count <= (8 if saves == loads != "none" else 14)
    ((wrong, most, _),) = pool.run(1, resharded, folder, None, "none")
    assert (wrong, most) == ([], 1)


def dcp_saves(folder):
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state, _ = _state(mesh, SHARDINGS["rows"], filled=True)
    writer = CheckpointWriter(folder, dist.get_rank())
    dcp.save(state, storage_writer=writer, planner=SavePlannerOfJson())


def test_dcp_can_use_the_storage_by_itself(pool, tmp_path):
    (tmp_path / "c").mkdir()
    pool.run(2, dcp_saves, tmp_path / "c")
    assert pool.run(1, resharded, tmp_path / "c", None, "columns")[0][:2] == ([], 1)


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
        write_and_publish(planned.stage, planned.writer, world)
    except OSError as error:
        return type(error).__name__
    return "saved"


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_one_rank_is_one_of_all(pool, tmp_path, failing):
    assert pool.run(2, fails_on_a_rank, tmp_path, failing) == ["FileExistsError"] * 2
    assert not os.path.lexists(tmp_path / "index.json")
