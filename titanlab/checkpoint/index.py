"""index.json of a checkpoint: where the bytes of each tensor are, and the checksums of all files.

Free of torch. `titanlab.checkpoint.index_reader` reads the file.

    {"checksum": "…",                      of all bytes that follow this key's comma
     "format": 1,
     "position": {"bytes": 812, "checksum": "…"},
     "objects": {"optimizer.state.x": 3},  entries that are not tensors
     "tensors": {"model.norm.weight": {"dtype": "float32", "shape": [64], "chunks": [[0, 192, 256, 0, 64]]}},
     "files": [{"name": "rank-00000.safetensors", "bytes": 448, "checksums": "…"}]}

A chunk is `[file, first byte, bytes, *offsets, *sizes]`; the chunks of a tensor fill it without overlap. `checksums`
has eight bytes for each block of 1 MiB, little-endian, as base64.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from titanlab.checkpoint.blocks import checksum

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


FORMAT = 1

ITEM_BYTES: Mapping[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "complex64": 8,
    "complex128": 16,
    "bool": 1,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
}
"""Bytes of an element, by the dtype's name in torch."""

FILE, START, BYTES, FIRST_OFFSET = range(4)
"""Columns of a chunk."""


class OtherFormat(Exception):
    """The checkpoint has a format that this version does not know; it may be whole."""


@dataclass(frozen=True, kw_only=True)
class IndexedTensor:
    """A tensor in a checkpoint.

    Attributes:
        dtype: its name in torch.
        shape: of the full tensor.
        chunks: [chunk, 3 + 2 * dims], as in the file.
    """

    dtype: str
    shape: tuple[int, ...]
    chunks: npt.NDArray[np.int64]

    @property
    def offsets(self) -> npt.NDArray[np.int64]:
        """[chunk, dims]."""
        return self.chunks[:, FIRST_OFFSET : FIRST_OFFSET + len(self.shape)]

    def chunk_at(self, offsets: Sequence[int]) -> int:
        """The number of the chunk that begins at the offsets."""
        (numbers,) = (self.offsets == tuple(offsets)).all(axis=1).nonzero()
        return int(numbers[0])

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """[chunk, dims]."""
        return self.chunks[:, FIRST_OFFSET + len(self.shape) :]


@dataclass(frozen=True, kw_only=True)
class IndexedFile:
    """A file of tensors."""

    name: str
    size: int
    checksums: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class CheckpointIndex:
    """The content of index.json.

    Attributes:
        position_bytes, position_checksum: of position.json.
        objects: JSON values of the entries that are not tensors.
        tensors: by name.
        files: in the order that the chunks refer to.
    """

    position_bytes: int
    position_checksum: int
    objects: Mapping[str, Any]
    tensors: Mapping[str, IndexedTensor]
    files: Sequence[IndexedFile]


def index_bytes(
    *,
    position: bytes,
    objects: Mapping[str, Any],
    tensors: Mapping[str, tuple[str, Sequence[int], Sequence[Sequence[int]]]],
    files: Sequence[IndexedFile],
) -> bytes:
    """The bytes of index.json.

    Args:
        position: content of position.json.
        tensors: dtype, shape and chunks, by name.
    """
    content = {
        "format": FORMAT,
        "position": {"bytes": len(position), "checksum": f"{checksum(position):016x}"},
        "objects": dict(objects),
        "tensors": {
            name: {"dtype": dtype, "shape": list(shape), "chunks": chunks}
            for name, (dtype, shape, chunks) in tensors.items()
        },
        "files": [
            {
                "name": file.name,
                "bytes": file.size,
                "checksums": base64.b64encode(struct.pack(f"<{len(file.checksums)}Q", *file.checksums)).decode(),
            }
            for file in files
        ],
    }
    return signed(json.dumps(content, separators=(",", ":"), allow_nan=False).encode())


def signed(content: bytes) -> bytes:
    """A JSON object with its checksum as the first key."""
    body = content[1:]
    return b'{"checksum":"%016x",' % checksum(body) + body
