"""What each rank writes in a save: the plan of all ranks, the layout of each rank's file, and the files themselves.

A checkpoint has one safetensors file a rank, position.json and index.json, and no pickle. DCP's planners keep several
objects for each part of a tensor and make metadata of DCP's own format. That matters: 405B parameters over 512 ranks
without a pipeline have 1.4 million parts.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from msgspec import structs
from torch import Tensor
from torch.distributed.tensor import DTensor

from titanlab.checkpoint.address_schema import Place
from titanlab.checkpoint.contents import POSITION, SavedPosition, position_bytes
from titanlab.checkpoint.index import IndexedFile, IndexEntry, check_tensors, index_bytes
from titanlab.checkpoint.reader import bytes_of, dtype_named
from titanlab.checkpoint.storage import (
    INDEX,
    ITEM_BYTES,
    BlockWriter,
    DamagedFile,
    StoreFolder,
    folder_at,
    written_again,
)
from titanlab.dtensor import local_part
from titanlab.records import first_line

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


class Part(NamedTuple):
    """A part of a tensor, or an entry that is not a tensor, which is saved as JSON.

    Attributes:
        name: of the entry.
        dtype: name in torch; empty: not a tensor.
        shape: of the full tensor.
        offsets, sizes: of the part.
        start: its first byte in a rank's file.
    """

    name: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    start: int = 0

    @property
    def size(self) -> int:
        """Bytes in a rank's file."""
        return ITEM_BYTES[self.dtype] * math.prod(self.sizes) if self.dtype else 0


def flat(state: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a nested state by their names in the checkpoint; DCP's load planner uses the same names."""
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner(dict(state), None, is_coordinator=True)
    return planner.state_dict


def parts_of(state: Mapping[str, Any]) -> list[Part]:
    """This rank's parts of a flat state.

    Raises:
        TypeError: a tensor has a dtype that cannot be saved.
    """
    parts = []
    for name, value in state.items():
        if not isinstance(value, Tensor):
            parts.append(Part(name))
            continue
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype not in ITEM_BYTES:
            raise TypeError(f"{name} has the dtype {dtype}, which a checkpoint cannot hold")
        shape = tuple(value.shape)
        if not isinstance(value, DTensor):
            parts.append(Part(name, dtype, shape, (0,) * len(shape), shape))
        # A rank outside of the tensor's mesh has no part of it.
        elif value.device_mesh.get_coordinate() is not None:
            chunks = value.__create_chunk_list__()
            parts += [Part(name, dtype, shape, tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks]
    return parts


def shared_out(plans: Sequence[Sequence[Part]]) -> list[list[Part]]:
    """The parts that each rank writes; a part that several ranks have goes to the one with the fewest bytes so far."""
    ranks: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for rank, parts in enumerate(plans):
        for part in parts:
            ranks.setdefault((part.name, part.offsets), []).append(rank)
    owners: dict[tuple[str, tuple[int, ...]], int] = {}
    written = [0] * len(plans)
    for parts in plans:
        for part in parts:
            key = part.name, part.offsets
            if key not in owners:
                owner = owners[key] = min(ranks[key], key=written.__getitem__)
                # An entry that is not a tensor counts too.
                written[owner] += part.size if part.dtype else 1
    return [[part for part in parts if owners[part.name, part.offsets] == rank] for rank, parts in enumerate(plans)]


@dataclass(frozen=True, kw_only=True)
class CheckpointShard:
    """The layout of a rank's file.

    Attributes:
        header: of safetensors, with its length before it.
        parts: of tensors, in the order of the file.
        objects: names of the entries that this rank writes as JSON.
        size: in bytes.
    """

    name: str
    header: bytes
    parts: Sequence[Part]
    objects: Sequence[str]
    size: int


def shard_of(parts: Sequence[Part], rank: int) -> CheckpointShard:
    """The layout of the file of a rank that writes these parts; every rank computes the same."""
    tensors = [part for part in parts if part.dtype]
    # Wide elements first, so that every element is aligned.
    tensors.sort(key=lambda part: (-ITEM_BYTES[part.dtype], part.dtype))
    entries, end = {}, 0
    for number, part in enumerate(tensors):
        known, size = _SAFETENSORS.get(part.dtype), part.size
        # Always with brackets, so that no two parts have the same name.
        entries[f"{part.name}[{','.join(map(str, part.offsets))}]"] = {
            "dtype": known or "U8",
            "shape": list(part.sizes) if known else [size],
            "data_offsets": [end, end + size],
        }
        tensors[number] = Part(*part[:5], end)
        end += size
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _ALIGNMENT)
    header = len(header).to_bytes(8, "little") + header
    return CheckpointShard(
        name=f"rank-{rank:05d}.safetensors",
        header=header,
        parts=[Part(*part[:5], len(header) + part.start) for part in tensors],
        objects=[part.name for part in parts if not part.dtype],
        size=len(header) + end,
    )


def entries_of(shards: Sequence[CheckpointShard]) -> dict[str, IndexEntry]:
    """The index's entries of all ranks' tensors.

    Raises:
        ValueError: the parts of a tensor do not cover it exactly.
    """
    tensors: dict[str, IndexEntry] = {}
    for number, shard in enumerate(shards):
        for part in shard.parts:
            entry = tensors.get(part.name)
            if entry is None:
                entry = tensors[part.name] = IndexEntry(dtype=part.dtype, shape=list(part.shape), chunks=[])
            entry.chunks.append([number, part.start, part.size, *part.offsets, *part.sizes])
    try:
        check_tensors(tensors, [shard.size for shard in shards])
    except DamagedFile as error:
        raise ValueError(f"what {len(shards)} ranks have is not a whole checkpoint: {error}") from error
    return tensors


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
        tensors: of the shard's parts, in their order.
        objects: entries that are not tensors, as JSON.
        content: all bytes of its file, if the tensors were copied.
    """

    shard: CheckpointShard
    tensors: Sequence[Tensor]
    objects: Mapping[str, str]
    content: Tensor | None = None


def stage(shard: CheckpointShard, state: Mapping[str, Any], into: HostBuffer | None = None) -> Staged:
    """Take this rank's data from a flat state.

    Args:
        into: copy the tensors to this buffer, so that training may change them while they are written. None: they must
            not change before `write` returns, and only tensors of a device are copied, one by one.

    Raises:
        TypeError: an entry is neither a tensor nor a value of JSON.
    """
    objects = {}
    for name in shard.objects:
        try:
            objects[name] = json.dumps(state[name], allow_nan=False)
        except (TypeError, ValueError) as error:
            kind = type(state[name]).__qualname__
            raise TypeError(f"{name} is {kind}: a checkpoint holds tensors and values of JSON only") from error
    tensors: list[Tensor] = []
    for part in shard.parts:
        tensor = local_part(state[part.name]).detach()
        if tuple(tensor.shape) != part.sizes:
            raise ValueError(f"{part.name} has the shape {list(tensor.shape)}, and the plan says {list(part.sizes)}")
        tensors.append(tensor)
    if into is None:
        return Staged(shard=shard, tensors=tensors, objects=objects)
    # The header too, so that the file is one range of memory.
    buffer = into.reserve(shard.size)
    buffer[: len(shard.header)] = torch.frombuffer(bytearray(shard.header), dtype=torch.uint8)
    for number, (part, tensor) in enumerate(zip(shard.parts, tensors, strict=True)):
        place = buffer[part.start : part.start + part.size].view(dtype_named(part.dtype)).view(part.sizes)
        tensors[number] = place.copy_(tensor, non_blocking=into.page_locked)
    return Staged(shard=shard, tensors=tensors, objects=objects, content=buffer)


def write(staged: Staged, folder: Place) -> IndexedFile:
    """Write a rank's file, and wait until it is on the disk or in the store.

    Raises:
        OSError: the disk is full, or the store does not answer.
    """
    shard = staged.shard

    def written() -> IndexedFile:
        with BlockWriter(folder / shard.name, shard.size) as file:
            if staged.content is not None:
                file.write(bytes_of(staged.content))
            else:
                file.write(shard.header)
                for part, tensor in zip(shard.parts, staged.tensors, strict=True):
                    content = bytes_of(tensor.to("cpu").contiguous())
                    assert len(content) == part.size
                    file.write(content)
            file.finish()
        return IndexedFile(name=shard.name, size=file.size, checksums=bytes(file.checksums))

    return written_again(folder, written)


def publish(
    folder: Place,
    position: SavedPosition,
    tensors: dict[str, IndexEntry],
    files: Sequence[IndexedFile],
    objects: Mapping[str, str],
) -> None:
    """Write position.json and then the index, which makes the checkpoint whole, and wait until they are durable.

    Args:
        position: without `files`.
        files: of all ranks, in their order.
        objects: entries that are not tensors, as JSON.

    Raises:
        OSError: the disk is full; or the store lacks bytes, does not answer, or refuses.
    """
    sizes = {file.name: file.size for file in files}
    last = position_bytes(structs.replace(position, files=sizes))
    place = folder_at(folder)
    if isinstance(place, StoreFolder):
        place.check_arrived(sizes)
    place.put(POSITION, last)
    values = {name: json.loads(text) for name, text in objects.items()}
    place.put(INDEX, index_bytes(position=last, objects=values, tensors=tensors, files=files))
