"""Plans what each rank writes in a save: the global plan, and the layout of each rank's file.

DCP's own planner makes the metadata of its own format besides, which titanlab's storage does not use, and copies every
entry twice. A layout of 405B parameters over 512 ranks without a pipeline has 1.4 million entries.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from titanlab.checkpoint.index import ITEM_BYTES
from titanlab.checkpoint.index_reader import fills

# Name and place of an entry; an entry that is not a tensor has no place.
_Key = tuple[str, tuple[int, ...] | None]
# Offsets and sizes of a part of a tensor.
_Part = tuple[tuple[int, ...], tuple[int, ...]]


def without_duplicates(plans: list[SavePlan]) -> list[SavePlan]:
    """The plans of all ranks; an entry of several ranks is in one plan only, the one that has least to write so far."""
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
        ValueError: they do not, with the name of the tensor.
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
        # Always with brackets, so that no two chunks have one name.
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
