"""Writes a checkpoint: one safetensors file a rank, position.json and index.json, and no pickle."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from titanlab.checkpoint import objects
from titanlab.checkpoint.address_schema import Place, StorePath
from titanlab.checkpoint.blocks import BlockWriter
from titanlab.checkpoint.folders import INDEX
from titanlab.checkpoint.index import IndexedFile, index_bytes
from titanlab.checkpoint.position import POSITION, SavedPosition, position_bytes
from titanlab.checkpoint.shards import (
    CheckpointShard,
    bytes_of,
    check_coverage,
    dtype_named,
    shard_of,
    without_duplicates,
)
from titanlab.dtensor import local_part
from titanlab.records import first_line
from titanlab.system import StoreFault, write_bytes


class HostBuffer:
    """Memory that is taken once and used again, because the kernel clears new pages while the training waits.

    Attributes:
        page_locked: whether devices copy into it by themselves.
    """

    def __init__(self, *, page_locked: bool = False) -> None:
        self.page_locked = page_locked
        self._memory: Tensor | None = None

    def reserve(self, size: int) -> Tensor:
        """So many bytes; what was taken before is overwritten."""
        if self._memory is None or len(self._memory) < size:
            # The smaller one is freed first.
            self._memory = None
            self._memory = self._taken(size)
        return self._memory[:size]

    def _taken(self, size: int) -> Tensor:
        if self.page_locked:
            try:
                return torch.empty(size, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                # A failed save ends no run; an error of the device would.
                raise OSError(errno.ENOMEM, f"the host pins no {size} bytes: {first_line(error)}") from error
        memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Processes that this one forks need no copy of it. Other systems have no such advice; a kernel may refuse it.
        with contextlib.suppress(OSError, AttributeError):
            memory.madvise(mmap.MADV_DONTFORK)
        return torch.frombuffer(memory, dtype=torch.uint8)


@dataclass(frozen=True, kw_only=True)
class Staged:
    """What one rank writes; it needs the model no more, if the tensors were copied.

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
    """Take what this rank writes from the model.

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
        OSError: the disk takes no more, or the store does not answer.
    """
    if isinstance(folder, StorePath):
        # A new upload after an error: nothing can be appended to one that was broken off.
        with objects.gone_is_fault(folder):
            return objects.again(lambda: _written(staged, folder))
    # Rank 0 has made the folder, but a host may not see it yet, and a caller may give each rank a folder of its own.
    folder.mkdir(parents=True, exist_ok=True)
    return _written(staged, folder)


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
        file=IndexedFile(name=shard.name, size=file.size, checksums=file.checksums), objects=dict(staged.objects)
    )


def publish(
    folder: Place, shards: Sequence[CheckpointShard], written: Sequence[Written], position: SavedPosition
) -> None:
    """Write position.json and then the index, which makes the checkpoint whole, and wait until all of it is durable.

    Args:
        shards, written: of all ranks, in their order.
        position: without `files`.

    Raises:
        OSError: the disk takes no more; or the store has not all bytes, does not answer, or refuses.
    """
    tensors: dict[str, tuple[str, Sequence[int], list[list[int]]]] = {}
    for number, shard in enumerate(shards):
        for chunk in shard.chunks:
            _, _, rows = tensors.setdefault(chunk.name, (chunk.dtype, chunk.shape, []))
            rows.append([number, chunk.start, chunk.size, *chunk.offsets, *chunk.sizes])
    values = {name: json.loads(text) for rank in written for name, text in rank.objects.items()}
    files = [rank.file for rank in written]
    last = position_bytes(replace(position, files={file.name: file.size for file in files}))
    index = index_bytes(position=last, objects=values, tensors=tensors, files=files)
    if not isinstance(folder, StorePath):
        for name, content in ((POSITION, last), (INDEX, index)):
            write_bytes(folder / name, content, durable=True)
        sync_folder(folder)
        return
    stored = objects.objects_below(folder)
    for file in files:
        size = stored[file.name].size if file.name in stored else 0
        if size != file.size:
            raise StoreFault(folder.address, f"it has {size} bytes of {file.name}, and {file.size} were written")
    objects.put(folder / POSITION, last)
    objects.put(folder / INDEX, index)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
