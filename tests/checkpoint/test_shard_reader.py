"""The storage that reads: every tensor under any layout, each block at most once, and no others."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.device_mesh import init_device_mesh

from tests.checkpoint.storage import SHARDINGS, of_every_dtype, read, sharded_state, write
from titanlab.checkpoint import DamagedCheckpoint, blocks
from titanlab.checkpoint.blocks import BLOCK
from titanlab.checkpoint.index import read_index
from titanlab.checkpoint.reader import JsonPlanner, ShardReader
from titanlab.checkpoint.writer import bytes_of
from titanlab.distributed import World


def same_bytes(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and bytes_of(one) == bytes_of(other)


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
        write(sharded_state(mesh, SHARDINGS[saves], filled=True)[0], folder, world=world)
    counts = {}
    original = blocks.BlockReader._read

    def counted(self, number, target):
        for block in range(number, number + blocks.blocks_of(len(target))):
            counts[self._name, block] = counts.get((self._name, block), 0) + 1
        original(self, number, target)

    blocks.BlockReader._read = counted
    try:
        state, _ = sharded_state(mesh, SHARDINGS[loads], filled=False)
        reader = ShardReader(folder, read_index(folder), "run")
        dcp.load(state, storage_reader=reader, planner=JsonPlanner())
    finally:
        blocks.BlockReader._read = original
    expected, _ = sharded_state(mesh, SHARDINGS[loads], filled=True)
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


def reader_of(folder):
    return ShardReader(folder, read_index(folder), "run")


def test_the_metadata_is_the_index(tmp_path):
    write({"x": torch.ones(2, 3, dtype=torch.bfloat16), "n": {"a": 5}}, tmp_path / "c")
    entries = reader_of(tmp_path / "c").read_metadata().state_dict_metadata
    assert set(entries) == {"x", "n.a"}
    assert (entries["x"].properties.dtype, entries["x"].size) == (torch.bfloat16, torch.Size([2, 3]))
    assert [(list(chunk.offsets), list(chunk.sizes)) for chunk in entries["x"].chunks] == [([0, 0], [2, 3])]
    assert isinstance(entries["n.a"], BytesStorageMetadata)


def test_plans_stay_as_they_are(tmp_path):
    write({"x": torch.ones(2)}, tmp_path / "c")
    reader, plan = reader_of(tmp_path / "c"), LoadPlan([])
    assert reader.prepare_local_plan(plan) is plan
    plans = [plan, plan]
    assert reader.prepare_global_plan(plans) is plans
    assert not ShardReader.validate_checkpoint_id(tmp_path / "c")
    assert (reader.checkpoint, reader.named_by, reader.blocks_read) == (tmp_path / "c", "run", 0)


def test_of_two_tensors_one_is_read(tmp_path):
    write({"x": torch.arange(4.0), "y": torch.arange(3), "n": 7}, tmp_path / "c")
    found = {"y": torch.zeros(3, dtype=torch.int64)}
    assert read(found, tmp_path / "c") == 1
    assert found["y"].tolist() == [0, 1, 2]
    nothing = {"n": 0}
    assert read(nothing, tmp_path / "c") == 0
    assert nothing == {"n": 7}


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (torch.zeros(3, 4, dtype=torch.float64), torch.arange(12, dtype=torch.float64).view(3, 4)),
        (torch.zeros(4, 3).t(), torch.arange(12.0).view(3, 4)),
        (torch.zeros(3, 8)[:, ::2], torch.arange(12.0).view(3, 4)),
        (torch.zeros(3, 4, dtype=torch.int32), torch.arange(12, dtype=torch.int32).view(3, 4)),
        (torch.zeros(3, 4, requires_grad=True), torch.arange(12.0).view(3, 4)),
    ],
)
def test_tensors_of_another_dtype_or_order_are_filled(tmp_path, target, expected):
    write({"x": torch.arange(12.0).view(3, 4)}, tmp_path / "c")
    read({"x": target}, tmp_path / "c")
    assert torch.equal(target, expected)


DAMAGES = {
    "another byte": (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"x"), "has other bytes than were saved"),
    "a byte less": (lambda path: path.write_bytes(path.read_bytes()[:-1]), "has 79 bytes, and had 80 when"),
    "no file": (lambda path: path.unlink(), "is missing"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "is no file"),
    "a link": (lambda path: (path.rename(path.with_name("x")), path.symlink_to("x")), "is a symbolic link"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_file_that_is_not_what_was_saved_is_damage(tmp_path, name):
    folder = tmp_path / "step-00000002"
    write({"x": torch.ones(2), "n": 1}, folder)
    spoil, reason = DAMAGES[name]
    spoil(folder / "rank-00000.safetensors")
    with pytest.raises(
        DamagedCheckpoint, match=rf"^run=.*step-00000002: is damaged: its (file )?rank-00000.safetensors {reason}"
    ):
        read({"x": torch.zeros(2)}, folder)
    # What needs no tensor is not affected.
    values = {"n": 0}
    read(values, folder)
    assert values == {"n": 1}
