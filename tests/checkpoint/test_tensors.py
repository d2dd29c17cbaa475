"""Tensors in files: every dtype under any layout, each block read at most once, no pickle, and any other byte is found."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import random
import struct
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.device_mesh import init_device_mesh

from tests.checkpoint.storage import SHARDINGS, of_every_dtype, read, sharded_state, started, write
from titanlab.checkpoint import DamagedCheckpoint, SavedPosition, load_state, loading, read_contents, storage
from titanlab.checkpoint.loading import bytes_of
from titanlab.checkpoint.saving import Part, entries_of, parts_of, shard_of, shared_out
from titanlab.checkpoint.storage import BLOCK, BlockReader, BlockWriter, DamagedFile, checksum, folder_at
from titanlab.distributed import World
from titanlab.errors import ConfigError
from titanlab.train.dcp import dcp_contents

# A run has a process group, also of one process.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")


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
    write({"a": {"step": 3, "name": "x", "rates": [0.5, None]}, "b": torch.ones(2)}, tmp_path / "c")
    found = {"a": None, "b": torch.zeros(2)}
    read(found, tmp_path / "c")
    assert (found["a"], found["b"].tolist()) == ({"step": 3, "name": "x", "rates": [0.5, None]}, [1.0, 1.0])
    for value in (object(), float("nan"), 1 + 2j, {1, 2}):
        with pytest.raises(TypeError, match="^x is .*: a checkpoint holds tensors and values of JSON only$"):
            write({"x": value}, tmp_path / "d")


def test_nothing_in_a_checkpoint_is_a_pickle(tmp_path):
    write(of_every_dtype(), tmp_path / "c")
    for path in (tmp_path / "c").iterdir():
        with pytest.raises((pickle.UnpicklingError, EOFError, ValueError, KeyError, IndexError, OverflowError)):
            pickle.loads(path.read_bytes())
        assert b"torch" not in path.read_bytes(), path.name


def test_a_tensor_that_has_changed_since_the_plan_is_refused(tmp_path):
    save = started({"x": torch.ones(3)}, tmp_path)
    save.state["x"] = torch.ones(4)
    with pytest.raises(ValueError, match=r"^x has the shape \[4\], and the plan says \[3\]$"):
        save.stage()


def test_a_dtype_that_no_checkpoint_holds_is_refused():
    with pytest.raises(TypeError, match=r"^x\.y has the dtype uint7, which a checkpoint cannot hold$"):
        parts_of({"x.y": torch.zeros(2, dtype=torch.uint7)})


def grid(shape, cuts):
    """Parts of a tensor that is cut into equal ranges along each dim."""
    parts = [((), ())]
    for size, count in zip(shape, cuts, strict=True):
        step = size // count
        parts = [((*o, i * step), (*s, step)) for o, s in parts for i in range(count)]
    return parts


def test_replicas_write_equal_shares():
    # Two replicas of two shards: each part is in two plans.
    parts = [Part(f"x{number}", "float32", (4, 8), (2 * shard, 0), (2, 8)) for number in range(6) for shard in (0, 1)]
    plans = [[part for part in parts if part.offsets[0] == 2 * shard] for shard in (0, 1, 0, 1)]
    found = shared_out(plans)
    assert sorted(part for plan in found for part in plan) == parts
    assert [len(plan) for plan in found] == [3, 3, 3, 3]


def test_every_part_is_written_once_by_a_rank_that_has_it():
    chosen = random.Random(0)
    for _ in range(50):
        ranks, cuts = chosen.randint(1, 6), (chosen.choice([1, 2, 4]), chosen.choice([1, 2]))
        parts = [Part(f"x{n}", "float32", (8, 4), *cut) for n in range(3) for cut in grid((8, 4), cuts)]
        homes = [chosen.sample(range(ranks), chosen.randint(1, ranks)) for _ in parts]
        plans = [[part for part, home in zip(parts, homes, strict=True) if rank in home] for rank in range(ranks)]
        found = shared_out(plans)
        assert all(set(own) <= set(plan) for own, plan in zip(found, plans, strict=True))
        assert sorted(part for own in found for part in own) == sorted(parts)
        entries = entries_of([shard_of(own, rank) for rank, own in enumerate(found)])
        assert {name: len(entry.chunks) for name, entry in entries.items()} == {
            f"x{n}": len(parts) // 3 for n in range(3)
        }


@pytest.mark.parametrize("other", [[], [Part("layers.3.weight", "float32", (6,), (2,), (4,))]])
def test_a_part_that_nobody_writes_is_named(other):
    parts = [Part("layers.3.weight", "float32", (4,), (0,), (2,))], other
    with pytest.raises(ValueError, match=r"2 ranks have is not a whole checkpoint: .*layers\.3\.weight"):
        entries_of([shard_of(own, rank) for rank, own in enumerate(parts)])


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
    original = storage.BlockReader._read

    def counted(self, number, target):
        for block in range(number, number + storage.blocks_of(len(target))):
            counts[self._name, block] = counts.get((self._name, block), 0) + 1
        original(self, number, target)

    storage.BlockReader._read = counted
    try:
        state, _ = sharded_state(mesh, SHARDINGS[loads], filled=False)
        load_state(state, read_contents(folder, "run"), world)
    finally:
        storage.BlockReader._read = original
    expected, _ = sharded_state(mesh, SHARDINGS[loads], filled=True)
    wrong = [name for name in state if not torch.equal(state[name].to_local(), expected[name].to_local())]
    return wrong, max(counts.values()), len(counts)


@pytest.mark.parametrize(
    ("saves", "loads"),
    [("rows", "columns"), ("columns", "rows"), ("none", "columns")],
)
def test_each_rank_reads_a_block_at_most_once_under_any_sharding(pool, tmp_path, saves, loads):
    folder = tmp_path / "c"
    for wrong, most, count in pool.run(2, resharded, folder, saves, loads):
        assert (wrong, most) == ([], 1)
        # 12 MiB in all.
        assert count <= 14
    ((wrong, most, _),) = pool.run(1, resharded, folder, None, "none")
    assert (wrong, most) == ([], 1)


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


STATE = {"model.x": torch.arange(6.0).view(2, 3), "n.rates": 0.5, "n.list": [1, None], "n.text": "é"}


def ours(folder, state):
    write(state, folder)
    return read_contents(folder, "run")


def plain(folder, state):
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    return dcp_contents(folder, "run", SavedPosition(step=0, parameters={}))


def empty():
    return {"model.x": torch.zeros(2, 3), "n.rates": 0.0, "n.list": [0, 0], "n.text": ""}


@pytest.mark.parametrize("make", [ours, plain])
def test_a_state_comes_back(tmp_path, make):
    reader, state = make(tmp_path / "c", STATE), empty()
    load_state(state, reader)
    assert torch.equal(state.pop("model.x"), STATE["model.x"])
    assert state == {name: value for name, value in STATE.items() if name != "model.x"}


@pytest.mark.parametrize("make", [ours, plain])
@pytest.mark.parametrize(
    "state", [{"model.y": torch.zeros(2)}, {"model.x": torch.zeros(3, 2)}, {"model.x": 3}, {"n.y": 3}]
)
def test_a_state_of_another_model_is_one_line(tmp_path, make, state):
    reader = make(tmp_path / "c", STATE)
    with pytest.raises(ConfigError) as caught:
        load_state(state, reader)
    assert not isinstance(caught.value, DamagedCheckpoint)
    assert str(caught.value).startswith(f"run={tmp_path / 'c'}: cannot be read (")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "pattern", "said"),
    [(ours, "*.safetensors", "rank-00000.safetensors is missing"), (plain, "*.distcp", "it has no file __0_0.distcp")],
)
def test_a_missing_file_is_damage(tmp_path, make, pattern, said):
    reader = make(tmp_path / "c", STATE)
    for path in (tmp_path / "c").glob(pattern):
        path.unlink()
    with pytest.raises(DamagedCheckpoint, match=said):
        load_state(empty(), reader)


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), MemoryError("out of memory")])
def test_an_error_of_the_machine_says_nothing_about_the_checkpoint(tmp_path, monkeypatch, error):
    reader = ours(tmp_path / "c", STATE)

    def fails(*given):
        raise error

    monkeypatch.setattr(loading, "BlockReader", fails)
    with pytest.raises(type(error)) as caught:
        load_state(empty(), reader)
    assert caught.value is error


SIZE = 9 * BLOCK + 1234
CONTENT = bytes(range(256)) * (SIZE // 256) + bytes(SIZE % 256)


@pytest.fixture
def block_file(tmp_path):
    with BlockWriter(tmp_path / "file") as file:
        # More than the writer's buffer, which then needs no copy, and less.
        for start, end in itertools.pairwise([0, 5 * BLOCK, *range(6 * BLOCK, SIZE, 700_001), SIZE]):
            file.write(CONTENT[start:end])
        file.finish()
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert (file.size, len(file.checksums)) == (SIZE, 80)
    assert file.checksums[:8] == checksum(CONTENT[:BLOCK]).to_bytes(8, "little")
    assert file.checksums[-8:] == checksum(CONTENT[9 * BLOCK :]).to_bytes(8, "little")
    return tmp_path / "file", file.checksums


def read_ranges(path, checksums, ranges):
    wrapped = patch.object(storage, "checksum", wraps=checksum)
    with wrapped as verified, BlockReader(path, SIZE, checksums) as file:
        for start, stop in ranges:
            target = bytearray(stop - start)
            file.read_into(start, memoryview(target))
            assert target == CONTENT[start:stop]
    return verified.call_count


@pytest.mark.parametrize(
    ("ranges", "blocks"),
    [
        ([(0, SIZE)], 10),
        ([(0, 0)], 0),
        ([(5, 6)], 1),
        ([(BLOCK - 1, BLOCK + 1)], 2),
        ([(10, 20), (30, 40), (BLOCK - 5, BLOCK)], 1),
        ([(10, 3 * BLOCK + 7), (3 * BLOCK + 7, 3 * BLOCK + 9), (3 * BLOCK + 9, 6 * BLOCK)], 6),
        ([(2 * BLOCK, 3 * BLOCK), (5 * BLOCK, 5 * BLOCK + 1), (9 * BLOCK + 5, SIZE)], 3),
        ([(start, min(start + 333_333, SIZE)) for start in range(0, SIZE, 333_333)], 10),
    ],
)
def test_ranges_in_order_read_each_block_once(block_file, ranges, blocks):
    assert read_ranges(*block_file, ranges) == blocks


@pytest.mark.parametrize("at", [0, BLOCK - 1, BLOCK, 4 * BLOCK + 17, SIZE - 1])
def test_another_byte_is_found_where_its_block_is_read_and_nowhere_else(block_file, at):
    path, checksums = block_file
    content = bytearray(CONTENT)
    content[at] ^= 1
    path.write_bytes(content)
    block = at // BLOCK
    for start, stop in [(at, at + 1), (0, SIZE), (block * BLOCK, min(block * BLOCK + BLOCK, SIZE))]:
        with pytest.raises(DamagedFile, match=f"^its file file has other bytes than were saved, in its block {block} "):
            read_ranges(path, checksums, [(start, stop)])
    with pytest.raises(DamagedFile), BlockReader(path, SIZE, checksums) as file:
        file.verify()
    apart = (block + 2) % 9
    assert read_ranges(path, checksums, [(apart * BLOCK, (apart + 1) * BLOCK)]) == 1


def test_what_is_no_file_of_that_size_is_not_read(block_file, tmp_path):
    path, checksums = block_file
    (tmp_path / "link").symlink_to(path)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name, rule in [
        ("link", "its file link is a symbolic link"),
        ("pipe", "its pipe is not a file"),
        ("folder", "its folder is not a file"),
        ("missing", "its file missing is missing"),
    ]:
        with pytest.raises(DamagedFile, match=f"^{rule}$"):
            BlockReader(tmp_path / name, SIZE, checksums)
    with pytest.raises(DamagedFile, match=f"has {SIZE} bytes, and had {SIZE + 1} when it was saved"):
        BlockReader(path, SIZE + 1, checksums)
    with BlockReader(path, SIZE, checksums) as file:
        os.truncate(path, SIZE - 1)
        with pytest.raises(DamagedFile, match="^its file file is shorter than it was when it was saved$"):
            file.verify()
    with pytest.raises(DamagedFile, match="has more than 100 bytes"):
        folder_at(tmp_path).read("file", 100)
