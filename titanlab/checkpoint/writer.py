"""What each rank writes in a save: the global plan, the layout of each rank's file, and the files themselves.

A checkpoint has one safetensors file a rank, position.json and index.json, and no pickle. DCP's own planner also makes
metadata of its own format, which titanlab's storage does not use, and copies every entry twice. That matters: 405B
parameters over 512 ranks without a pipeline have 1.4 million entries.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from msgspec import structs
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from titanlab.checkpoint.address_schema import Place
from titanlab.checkpoint.blocks import ITEM_BYTES, BlockWriter
from titanlab.checkpoint.index import IndexedFile, IndexEntry, fills, index_bytes
from titanlab.checkpoint.position import POSITION, SavedPosition, position_bytes
from titanlab.checkpoint.storage import INDEX, folder_at
from titanlab.dtensor import local_part
from titanlab.records import first_line

# Name and place of an entry; an entry that is not a tensor has no place.
_Key = tuple[str, tuple[int, ...] | None]
# Offsets and sizes of a part of a tensor.
_Part = tuple[tuple[int, ...], tuple[int, ...]]


def without_duplicates(plans: list[SavePlan]) -> list[SavePlan]:
    """The plans of all ranks; an entry of several ranks is in only one plan, the one with the fewest bytes so far."""
    first: dict[_Key, int] = {}
    several: dict[_Key, list[int]] = {}
    for number, plan in enumerate(plans):
        for item in plan.items:
            key = (item.index.fqn, item.index.offset)
            owner = first.setdefault(key, number)
            if owner != number:
                several.setdefault(key, [owner]).append(number)
    if not several:
        return plans
    owners = _owners(plans, several)
    return [
        replace(
            plan,
            items=[item for item in plan.items if owners.get((item.index.fqn, item.index.offset), number) == number],
        )
        for number, plan in enumerate(plans)
    ]


def _owners(plans: Sequence[SavePlan], several: Mapping[_Key, Sequence[int]]) -> dict[_Key, int]:
    """The plan that keeps each entry of several ranks."""
    owners: dict[_Key, int] = {}
    bytes_of_plan = [0] * len(plans)
    for number, plan in enumerate(plans):
        for item in plan.items:
            key = (item.index.fqn, item.index.offset)
            candidates = several.get(key)
            if candidates is None:
                bytes_of_plan[number] += _bytes_of(item)
            elif key not in owners:
                owner = min(candidates, key=bytes_of_plan.__getitem__)
                owners[key] = owner
                bytes_of_plan[owner] += _bytes_of(item)
    return owners


def _bytes_of(item: WriteItem) -> int:
    data = item.tensor_data
    if data is None or data.chunk is None:
        return 1
    return math.prod(data.chunk.sizes) * ITEM_BYTES.get(str(data.properties.dtype).removeprefix("torch."), 1)


def check_coverage(plans: Sequence[SavePlan]) -> None:
    """Check that the parts of every tensor lie in it, do not overlap, and leave nothing out.

    Raises:
        ValueError: they do not; names the tensor.
    """
    parts: dict[str, tuple[tuple[int, ...], list[_Part]]] = {}
    for plan in plans:
        for item in plan.items:
            data = item.tensor_data
            if data is None:
                continue
            shape, known = parts.setdefault(item.index.fqn, (data.size, []))
            if shape != data.size:
                raise ValueError(
                    f"{item.index.fqn} has the shape {list(shape)} on one rank, {list(data.size)} on another"
                )
            known.append((data.chunk.offsets, data.chunk.sizes))
    for name, (shape, known) in parts.items():
        if not covers(shape, known):
            raise ValueError(f"the parts of {name} on {len(plans)} ranks do not cover its shape {list(shape)} exactly")


def covers(shape: Sequence[int], parts: Sequence[_Part]) -> bool:
    """Whether parts of a tensor lie in it and cover it exactly; parts without elements do not count."""
    offsets, sizes = np.array(parts, np.int64).reshape(len(parts), 2, len(shape)).transpose(1, 0, 2)
    inside = (offsets >= 0).all() and (offsets + sizes <= np.array(shape, np.int64)).all()
    return bool(inside) and fills(shape, offsets, sizes)


# By the dtype's name in torch. Bytes of other dtypes are saved as U8; the index has their dtype.
_SAFETENSORS: Mapping[str, str] = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "bool": "BOOL",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_ALIGNMENT = 8


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A part of a tensor in a rank's file.

    Attributes:
        index: where the save plan finds the tensor.
        name: of the entry.
        dtype: name in torch.
        shape: of the full tensor.
        offsets, sizes: of the part.
        start, size: in bytes, from the beginning of the file.
    """

    index: MetadataIndex
    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    size: int


@dataclass(frozen=True, kw_only=True)
class CheckpointShard:
    """A rank's file."""

    name: str
    header: bytes
    chunks: Sequence[Chunk]
    size: int


def shard_of(plan: SavePlan, rank: int) -> CheckpointShard:
    """The layout of the file of a rank, from its part of the save plan; every rank computes the same.

    Raises:
        TypeError: a tensor has a dtype that cannot be saved.
    """
    items = []
    for item in plan.items:
        tensor = item.tensor_data
        if tensor is None:
            continue
        dtype = str(tensor.properties.dtype).removeprefix("torch.")
        if dtype not in ITEM_BYTES:
            raise TypeError(f"{item.index.fqn} has the dtype {dtype}, which a checkpoint cannot hold")
        items.append((dtype, item.index, tuple(tensor.size), tuple(tensor.chunk.offsets), tuple(tensor.chunk.sizes)))
    # Wide elements first, so that every element is aligned.
    items.sort(key=lambda item: (-ITEM_BYTES[item[0]], item[0]))
    sizes = [ITEM_BYTES[item[0]] * math.prod(item[4]) for item in items]
    entries, end = {}, 0
    for (dtype, index, _, offsets, shape), size in zip(items, sizes, strict=True):
        known = _SAFETENSORS.get(dtype)
        # Always with brackets, so that no two chunks have the same name.
        entries[f"{index.fqn}[{','.join(map(str, offsets))}]"] = {
            "dtype": known or "U8",
            "shape": list(shape) if known else [size],
            "data_offsets": [end, end + size],
        }
        end += size
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _ALIGNMENT)
    start = 8 + len(header)
    chunks = []
    for (dtype, index, shape, offsets, extents), size in zip(items, sizes, strict=True):
        chunks.append(
            Chunk(
                index=index,
                name=index.fqn,
                dtype=dtype,
                shape=shape,
                offsets=offsets,
                sizes=extents,
                start=start,
                size=size,
            )
        )
        start += size
    return CheckpointShard(
        name=f"rank-{rank:05d}.safetensors",
        header=len(header).to_bytes(8, "little") + header,
        chunks=chunks,
        size=start,
    )


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, without a copy."""
    content: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(content).cast("B")


def dtype_named(name: str) -> torch.dtype:
    """The dtype of a name in the index."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


class HostBuffer:
    """Memory that is taken once and used again, because the kernel clears new pages while the training waits.

    Attributes:
        page_locked: whether the memory is pinned, so that devices can copy into it asynchronously.
    """

    def __init__(self, *, page_locked: bool = False) -> None:
        self.page_locked = page_locked
        self._memory: Tensor | None = None

    def reserve(self, size: int) -> Tensor:
        """A buffer of `size` bytes; it overwrites the buffer that was taken before."""
        if self._memory is None or len(self._memory) < size:
            # Free the smaller buffer before taking a larger one.
            self._memory = None
            self._memory = self._taken(size)
        return self._memory[:size]

    def _taken(self, size: int) -> Tensor:
        if self.page_locked:
            try:
                return torch.empty(size, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                # OSError instead of the device's error: a failed save does not end the run.
                raise OSError(errno.ENOMEM, f"the host pins no {size} bytes: {first_line(error)}") from error
        memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Forked processes need no copy of the buffer. Other systems lack this advice; a kernel may refuse it.
        with contextlib.suppress(OSError, AttributeError):
            memory.madvise(mmap.MADV_DONTFORK)
        return torch.frombuffer(memory, dtype=torch.uint8)


@dataclass(frozen=True, kw_only=True)
class Staged:
    """The data that one rank writes; independent of the model if the tensors were copied.

    Attributes:
        shard: the layout of its file.
        tensors: of the shard's chunks, in their order.
        objects: entries that are not tensors, as JSON.
        content: all bytes of its file, if the tensors were copied.
    """

    shard: CheckpointShard
    tensors: Sequence[Tensor]
    objects: Mapping[str, str]
    content: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Written:
    """What one rank has written."""

    file: IndexedFile
    objects: Mapping[str, str]


class SavePlannerOfJson(dcp.DefaultSavePlanner):
    """Encodes entries that are not tensors as JSON: DefaultSavePlanner would pickle them."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The plans of all ranks, in which every part of a tensor is written once; the metadata is empty.

        Raises:
            ValueError: the parts of a tensor do not cover it exactly.
        """
        plans = without_duplicates(all_plans)
        check_coverage(plans)
        return plans, Metadata({})

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002 - the name in torch
        """The tensor, or the bytes of an object.

        Raises:
            TypeError: the object is not a value of JSON.
        """
        if write_item.type is not WriteItemType.BYTE_IO:
            return object
        try:
            text = json.dumps(object, allow_nan=False)
        except (TypeError, ValueError) as error:
            kind = type(object).__qualname__
            rule = "a checkpoint holds tensors and values of JSON only"
            raise TypeError(f"{write_item.index.fqn} is {kind}: {rule}") from error
        return io.BytesIO(text.encode())


def stage(plan: SavePlan, planner: SavePlanner, rank: int, into: HostBuffer | None = None) -> Staged:
    """Take this rank's data from the model.

    Args:
        plan: this rank's part of the save plan.
        into: copy the tensors to this buffer, so that training may change them while they are written. None: they must
            not change before `write` returns, and only tensors of a device are copied, one by one.
    """
    shard = shard_of(plan, rank)
    items = {item.index: item for item in plan.items}
    objects = {}
    for item in plan.items:
        if item.type is WriteItemType.BYTE_IO:
            content = planner.resolve_data(item)
            assert isinstance(content, io.BytesIO)
            objects[item.index.fqn] = content.getvalue().decode()
    tensors: list[Tensor] = []
    for chunk in shard.chunks:
        tensor = local_part(planner.resolve_data(items[chunk.index]))
        assert isinstance(tensor, Tensor)
        if tuple(tensor.shape) != chunk.sizes:
            raise ValueError(f"{chunk.name} has the shape {list(tensor.shape)}, and the plan says {list(chunk.sizes)}")
        tensors.append(tensor.detach())
    if into is None:
        return Staged(shard=shard, tensors=tensors, objects=objects)
    # The header too, so that the file is one range of memory.
    buffer = into.reserve(shard.size)
    buffer[: len(shard.header)] = torch.frombuffer(bytearray(shard.header), dtype=torch.uint8)
    for number, (chunk, tensor) in enumerate(zip(shard.chunks, tensors, strict=True)):
        place = buffer[chunk.start : chunk.start + chunk.size].view(dtype_named(chunk.dtype)).view(chunk.sizes)
        tensors[number] = place.copy_(tensor, non_blocking=into.page_locked)
    return Staged(shard=shard, tensors=tensors, objects=objects, content=buffer)


def write(staged: Staged, folder: Place) -> Written:
    """Write a rank's file, and wait until it is on the disk or in the store.

    Raises:
        OSError: the disk is full, or the store does not answer.
    """
    return folder_at(folder).tried(lambda: _written(staged, folder))


def _written(staged: Staged, folder: Place) -> Written:
    shard = staged.shard
    with BlockWriter(folder / shard.name, shard.size) as file:
        if staged.content is not None:
            file.write(bytes_of(staged.content))
        else:
            file.write(shard.header)
            for chunk, tensor in zip(shard.chunks, staged.tensors, strict=True):
                content = bytes_of(tensor.detach().to("cpu").contiguous())
                assert len(content) == chunk.size
                file.write(content)
        file.finish()
    return Written(
        file=IndexedFile(name=shard.name, size=file.size, checksums=bytes(file.checksums)), objects=dict(staged.objects)
    )


def publish(
    folder: Place, shards: Sequence[CheckpointShard], written: Sequence[Written], position: SavedPosition
) -> None:
    """Write position.json and then the index, which makes the checkpoint whole, and wait until they are durable.

    Args:
        shards, written: of all ranks, in their order.
        position: without `files`.

    Raises:
        OSError: the disk is full; or the store lacks bytes, does not answer, or refuses.
    """
    tensors: dict[str, IndexEntry] = {}
    for number, shard in enumerate(shards):
        for chunk in shard.chunks:
            entry = tensors.get(chunk.name)
            if entry is None:
                entry = tensors[chunk.name] = IndexEntry(dtype=chunk.dtype, shape=list(chunk.shape), chunks=[])
            entry.chunks.append([number, chunk.start, chunk.size, *chunk.offsets, *chunk.sizes])
    values = {name: json.loads(text) for rank in written for name, text in rank.objects.items()}
    files = [rank.file for rank in written]
    sizes = {file.name: file.size for file in files}
    last = position_bytes(structs.replace(position, files=sizes))
    place = folder_at(folder)
    place.check_arrived(sizes)
    place.put(POSITION, last)
    place.put(INDEX, index_bytes(position=last, objects=values, tensors=tensors, files=files))
