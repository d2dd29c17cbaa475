"""The file of a rank: its order, its header and its bytes are those of safetensors."""

from __future__ import annotations

import json

import pytest
import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from titanlab.checkpoint import ITEM_BYTES
from titanlab.checkpoint.writer import bytes_of, dtype_named, shard_of


def plan_of(state):
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, None, is_coordinator=True)
    return planner.create_local_plan()


def part(name, dtype, shape, offsets, sizes):
    """An item of a plan: a part of a tensor."""
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)),
        properties=TensorProperties(dtype=dtype),
        size=torch.Size(shape),
    )
    return WriteItem(index=MetadataIndex(name, torch.Size(offsets)), type=WriteItemType.SHARD, tensor_data=data)


def header_of(shard):
    assert int.from_bytes(shard.header[:8], "little") == len(shard.header) - 8
    return json.loads(shard.header[8:])


def test_a_rank_without_tensors_has_a_file_of_a_header():
    for plan in (SavePlan([]), plan_of({"step": 3})):
        shard = shard_of(plan, 0)
        assert (shard.name, list(shard.chunks), shard.size) == ("rank-00000.safetensors", [], 16)
        assert shard.header == b"\x08\0\0\0\0\0\0\0{}      "


@pytest.mark.parametrize(("rank", "name"), [(7, "rank-00007"), (12345, "rank-12345"), (123456, "rank-123456")])
def test_a_file_is_named_after_its_rank(rank, name):
    assert shard_of(SavePlan([]), rank).name == f"{name}.safetensors"


def test_wide_elements_stand_first_in_the_order_of_the_plan():
    state = {
        "a": torch.zeros(3, dtype=torch.uint8),
        "b": torch.zeros(2, dtype=torch.bfloat16),
        "c": torch.zeros(2),
        "d": torch.zeros(1, dtype=torch.int64),
        "e": torch.zeros(1, dtype=torch.int32),
        "f": torch.zeros(1),
    }
    shard = shard_of(plan_of(state), 1)
    assert [chunk.name for chunk in shard.chunks] == ["d", "c", "f", "e", "b", "a"]
    start = len(shard.header)
    assert start % 8 == 0
    for chunk, size in zip(shard.chunks, [8, 8, 4, 4, 4, 3], strict=True):
        assert (chunk.start, chunk.size) == (start, size)
        assert chunk.start % ITEM_BYTES[chunk.dtype] == 0
        start += size
    assert shard.size == start


def test_the_header_names_each_part_by_its_offsets():
    plan = SavePlan([
        part("x", torch.float32, (4, 6), (2, 0), (2, 3)),
        part("x", torch.float32, (4, 6), (2, 3), (2, 3)),
        part("s", torch.float32, (), (), ()),
        part("e", torch.float32, (0, 5), (0, 0), (0, 5)),
    ])  # fmt: skip
    shard = shard_of(plan, 0)
    assert header_of(shard) == {
        "x[2,0]": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "x[2,3]": {"dtype": "F32", "shape": [2, 3], "data_offsets": [24, 48]},
        "s[]": {"dtype": "F32", "shape": [], "data_offsets": [48, 52]},
        "e[0,0]": {"dtype": "F32", "shape": [0, 5], "data_offsets": [52, 52]},
    }
    first = shard.chunks[0]
    assert (first.name, first.dtype, first.shape) == ("x", "float32", (4, 6))
    assert (first.offsets, first.sizes) == ((2, 0), (2, 3))
    assert first.index == MetadataIndex("x", torch.Size([2, 0]))


def test_a_dtype_that_safetensors_lacks_is_written_as_bytes():
    plan = plan_of({"x": torch.zeros(2, 3, dtype=torch.complex64)})
    assert header_of(shard_of(plan, 0)) == {"x[0,0]": {"dtype": "U8", "shape": [48], "data_offsets": [0, 48]}}
    assert shard_of(plan, 0).chunks[0].dtype == "complex64"


def test_every_dtype_of_the_index_has_a_file():
    for name, size in ITEM_BYTES.items():
        shard = shard_of(SavePlan([part("x", dtype_named(name), (5,), (0,), (5,))]), 0)
        assert (shard.chunks[0].dtype, shard.chunks[0].size) == (name, 5 * size)


def test_a_dtype_that_no_checkpoint_holds_is_refused():
    with pytest.raises(TypeError, match=r"^x\.y has the dtype qint8, which a checkpoint cannot hold$"):
        shard_of(SavePlan([part("x.y", torch.qint8, (2,), (0,), (2,))]), 0)


def test_the_bytes_of_a_tensor_are_not_copied():
    tensor = torch.tensor([1, 258], dtype=torch.int16)
    content = bytes_of(tensor)
    assert bytes(content) == b"\x01\x00\x02\x01"
    content[0] = 5
    assert tensor.tolist() == [5, 258]
    assert bytes(bytes_of(torch.tensor(1.0, requires_grad=True))) == b"\0\0\x80?"
    assert bytes(bytes_of(torch.zeros(0, 3))) == b""
    assert dtype_named("float8_e5m2") is torch.float8_e5m2
