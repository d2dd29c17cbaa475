"""A storage for DCP that writes one safetensors file a rank and index.json, and no pickle."""

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
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from titanlab.checkpoint import objects
from titanlab.checkpoint.address_schema import Place, StorePath
from titanlab.checkpoint.blocks import BlockWriter
from titanlab.checkpoint.folders import INDEX
from titanlab.checkpoint.index import IndexedFile, index_bytes
from titanlab.checkpoint.position import POSITION, Position, SavedPosition, position_bytes
from titanlab.checkpoint.shards import (
    CheckpointShard,
    Chunk,
    bytes_of,
    check_coverage,
    dtype_named,
    shard_of,
    without_duplicates,
)
from titanlab.dtensor import local_part
from titanlab.records.outcome import first_line
from titanlab.system.files import StoreFault, write_bytes


class HostBuffer:
    """Memory that is taken once and used again, because the kernel clears new pages while the training waits.

    Attributes:
        page_locked: whether devices copy into it by themselves.
    """

    def __init__(self, *, page_locked: bool = False) -> None:
        self.page_locked = page_locked
        self._memory: Tensor | None = None

    def reserve(self, size: int) -> Tensor:
        """So many bytes; what was taken before is overwritten.

        Raises:
            OSError: the host has no more memory.
        """
        if self._memory is None or len(self._memory) < size:
            # The smaller one is freed first.
            self._memory = None
            self._memory = _locked(size) if self.page_locked else _mapped(size)
        return self._memory[:size]


def _locked(size: int) -> Tensor:
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        # A failed save ends no run; an error of the device would.
        raise OSError(errno.ENOMEM, f"the host pins no {size} bytes: {first_line(error)}") from error


def _mapped(size: int) -> Tensor:
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Processes that this one forks need no copy of it. Other systems have no such advice, and a kernel may refuse it.
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
    """What one rank has written.

    Attributes:
        file: its file.
        objects: as in `Staged`.
    """

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


class CheckpointWriter(dcp.StorageWriter):
    """A storage for `torch.distributed.checkpoint`, which plans what each rank writes.

    Args:
        folder: an empty folder, the same for all ranks.
        rank: of this process.

    Attributes:
        position: content of position.json without `files`; the coordinator needs it before `finish`.
        shards: layouts of all ranks' files, on the coordinator only; `prepare_global_plan` sets them.
    """

    def __init__(self, folder: Place, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self.position = SavedPosition(position=Position(), parameters={}, files={})
        self.shards: Sequence[CheckpointShard] = ()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to do: a writer writes one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001
        """Nothing to do."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan, unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Remember where every rank will write; called on the coordinator only."""
        self.shards = [shard_of(plan, rank) for rank, plan in enumerate(plans)]
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file."""
        written = write(stage(plan, planner, self.rank), self.folder)
        future: Future[list[WriteResult]] = Future()
        # The results are ours alone: `finish` receives them. The index names the rank's file, not an entry.
        index = MetadataIndex(written.file.name)
        future.set_result([WriteResult(index=index, size_in_bytes=written.file.size, storage_data=written)])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write position.json and the index; called on the coordinator when all ranks have written."""
        self.publish([result.storage_data for of_rank in results for result in of_rank])

    def publish(self, written: Sequence[Written]) -> None:
        """Write position.json and the index, and wait until the folder is on the disk.

        Args:
            written: of all ranks, in their order.
        """
        tensors: dict[str, tuple[str, Sequence[int], list[list[int]]]] = {}
        for number, shard in enumerate(self.shards):
            for chunk in shard.chunks:
                _, _, rows = tensors.setdefault(chunk.name, (chunk.dtype, chunk.shape, []))
                rows.append([number, chunk.start, chunk.size, *chunk.offsets, *chunk.sizes])
        objects = {name: json.loads(text) for rank in written for name, text in rank.objects.items()}
        files = [rank.file for rank in written]
        position = position_bytes(replace(self.position, files={file.name: file.size for file in files}))
        index = index_bytes(position=position, objects=objects, tensors=tensors, files=files)
        if isinstance(self.folder, StorePath):
            _publish_in_store(self.folder, files, position, index)
            return
        for name, content in ((POSITION, position), (INDEX, index)):
            write_bytes(self.folder / name, content, durable=True)
        sync_folder(self.folder)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """False: DCP never chooses this storage by itself."""
        return False


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
    tensors = [_resolved(planner, items[chunk.index], chunk) for chunk in shard.chunks]
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
        return objects.gone_is_fault(lambda: objects.again(lambda: _written(staged, folder)), folder)
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


def _publish_in_store(folder: StorePath, files: Sequence[IndexedFile], position: bytes, index: bytes) -> None:
    """Write position.json and the index, which makes the checkpoint complete, after a look at what the store has.

    Raises:
        StoreFault: the store has not all bytes, does not answer, or refuses.
    """
    stored = objects.objects_below(folder)
    for file in files:
        size = stored[file.name].size if file.name in stored else 0
        if size != file.size:
            raise StoreFault(folder.address, f"it has {size} bytes of {file.name}, and {file.size} were written")
    objects.put(folder / POSITION, position)
    objects.put(folder / INDEX, index)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _resolved(planner: SavePlanner, item: WriteItem, chunk: Chunk) -> Tensor:
    tensor = local_part(planner.resolve_data(item))
    assert isinstance(tensor, Tensor)
    if tuple(tensor.shape) != chunk.sizes:
        raise ValueError(f"{chunk.name} has the shape {list(tensor.shape)}, and the plan says {list(chunk.sizes)}")
    return tensor.detach()
