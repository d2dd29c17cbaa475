"""The file of one rank: which tensors of a save plan it has, and where. A valid safetensors file, ordered by dtype."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan

from titanlab.checkpoint.index.format import ITEM_BYTES

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
class Shard:
    """A rank's file.

    Attributes:
        name: of the file.
        header: the bytes before the first tensor.
        chunks: in the order of the file; each dtype is one range of bytes.
        size: bytes of the file.
    """

    name: str
    header: bytes
    chunks: Sequence[Chunk]
    size: int


def shard_of(plan: SavePlan, rank: int) -> Shard:
    """The file of a rank whose part of the save plan is given; every rank computes the same.

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
        entries[_entry_name(index.fqn, offsets)] = {
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
    return Shard(
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


def _entry_name(name: str, offsets: Sequence[int]) -> str:
    # Always with brackets, so that no two chunks have one name.
    return f"{name}[{','.join(map(str, offsets))}]"
