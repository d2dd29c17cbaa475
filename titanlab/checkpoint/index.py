"""index.json of a checkpoint: where the bytes of each tensor are, and the checksums of all files.

Free of torch. The file may come from an untrusted source: every value's type and range is checked.

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
import binascii
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from titanlab.checkpoint.blocks import blocks_of, checksum, read_regular
from titanlab.checkpoint.damage import DamagedFile
from titanlab.checkpoint.remote.address_schema import Place
from titanlab.checkpoint.tiling import fills, overlap

INDEX = "index.json"
FORMAT = 1
# The index of a checkpoint of 405B parameters over 512 ranks has about a fifth of this size.
MOST_BYTES = 1 << 29
# Prevents overflow of 64 bits in the arithmetic of offsets.
_MOST_TENSOR_BYTES = 1 << 60
_MOST_DIMS = 32

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
_PREFIX = re.compile(rb'\{"checksum":"([0-9a-f]{16})",')
_FILE_NAME = re.compile(r"rank-[0-9]{5,9}\.safetensors")
_HEX = re.compile(r"[0-9a-f]{16}")


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
        (numbers,) = (self.offsets == np.array(offsets, np.int64)).all(axis=1).nonzero()
        return int(numbers[0])

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """[chunk, dims]."""
        return self.chunks[:, FIRST_OFFSET + len(self.shape) :]


@dataclass(frozen=True, kw_only=True)
class IndexedFile:
    """A file of tensors.

    Attributes:
        name: without a folder.
        size: in bytes.
        checksums: of each block.
    """

    name: str
    size: int
    checksums: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Index:
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
                "checksums": base64.b64encode(np.array(file.checksums, "<u8").tobytes()).decode(),
            }
            for file in files
        ],
    }
    return signed(json.dumps(content, separators=(",", ":"), allow_nan=False).encode())


def signed(content: bytes) -> bytes:
    """A JSON object with its checksum as the first key."""
    body = content[1:]
    return b'{"checksum":"%016x",' % checksum(body) + body


def read_index(checkpoint: Place) -> Index:
    """Read and check index.json.

    Raises:
        DamagedFile: it is missing or damaged.
        OtherFormat: a version of titanlab with another format has written it.
        OSError: it cannot be read, and may be whole.
    """
    content = read_regular(checkpoint / INDEX, MOST_BYTES)
    prefix = _PREFIX.match(content)
    if prefix is None:
        raise DamagedFile(f"its file {INDEX} is no index of a checkpoint")
    if checksum(memoryview(content)[prefix.end() :]) != int(prefix[1], 16):
        raise DamagedFile(f"its file {INDEX} has other bytes than were saved")
    try:
        return _index(strict_json(content))
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        if isinstance(error, DamagedFile):
            raise DamagedFile(f"its file {INDEX} {error}") from error
        raise DamagedFile(f"its file {INDEX} is no JSON ({type(error).__name__})") from error


def strict_json(content: bytes) -> Any:
    """Parse JSON without NaN, infinity and repeated keys.

    Raises:
        ValueError: the content is something else.
        RecursionError: it is nested too deep.
    """
    return json.loads(content, object_pairs_hook=_object, parse_constant=_refuse_constant)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        raise ValueError("a key stands twice in it")
    return mapping


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _index(node: Any) -> Index:
    version = node.get("format") if isinstance(node, dict) else None
    if type(version) is int and version != FORMAT:
        raise OtherFormat(f"has the format {version}, and this version of titanlab reads {FORMAT}")
    fields = _fields(node, "the index", ("checksum", "format", "position", "objects", "tensors", "files"))
    _expect(type(version) is int, "a format")
    position = _fields(fields["position"], "position", ("bytes", "checksum"))
    _expect(isinstance(position["checksum"], str) and _HEX.fullmatch(position["checksum"]), "a checksum of position")
    _expect(isinstance(fields["files"], list), "a list of files")
    files = [_file(file) for file in fields["files"]]
    _expect(len({file.name for file in files}) == len(files), "files of different names")
    sizes = np.array([file.size for file in files], np.int64)
    tensors = {name: _tensor(name, tensor, sizes) for name, tensor in _mapping(fields["tensors"], "tensors").items()}
    objects = _mapping(fields["objects"], "objects")
    _expect(not objects.keys() & tensors.keys(), "different names of tensors and objects")
    ranges = [tensor.chunks[:, :FIRST_OFFSET] for tensor in tensors.values()]
    _expect(not ranges or not overlap(np.concatenate(ranges)), "chunks whose bytes are apart")
    return Index(
        position_bytes=_count(position["bytes"]),
        position_checksum=int(position["checksum"], 16),
        objects=objects,
        tensors=tensors,
        files=files,
    )


def _file(node: Any) -> IndexedFile:
    fields = _fields(node, "a file", ("name", "bytes", "checksums"))
    name, size, text = fields["name"], _count(fields["bytes"]), fields["checksums"]
    # The file is opened later: it must be inside of the checkpoint's folder.
    _expect(isinstance(name, str) and _FILE_NAME.fullmatch(name), "the name of a file of tensors")
    _expect(isinstance(text, str), "checksums as text")
    try:
        packed = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise DamagedFile("lacks checksums as base64") from error
    _expect(len(packed) == 8 * blocks_of(size), f"one checksum for each block of {name}")
    return IndexedFile(name=name, size=size, checksums=np.frombuffer(packed, "<u8").tolist())


def _tensor(name: str, node: Any, file_sizes: npt.NDArray[np.int64]) -> IndexedTensor:
    fields = _fields(node, "a tensor", ("dtype", "shape", "chunks"))
    dtype, shape, rows = fields["dtype"], fields["shape"], fields["chunks"]
    _expect(isinstance(dtype, str) and dtype in ITEM_BYTES, "a dtype")
    _expect(isinstance(shape, list) and len(shape) <= _MOST_DIMS, f"the shape of {name}")
    shape = tuple(map(_count, shape))
    # Sizes of 0 are left out, so that no partial product is too large.
    _expect(math.prod(size or 1 for size in shape) * ITEM_BYTES[dtype] < _MOST_TENSOR_BYTES, f"a size of {name}")
    dims = len(shape)
    _expect(isinstance(rows, list) and set(map(type, rows)) <= {list}, f"the chunks of {name}")
    _expect(set(map(len, rows)) <= {FIRST_OFFSET + 2 * dims}, f"chunks of {name} of its dimensions")
    # True would become 1 below.
    _expect(set(map(type, itertools.chain.from_iterable(rows))) <= {int}, f"whole numbers in the chunks of {name}")
    chunks = np.array(rows, np.int64).reshape(len(rows), FIRST_OFFSET + 2 * dims)
    tensor = IndexedTensor(dtype=dtype, shape=shape, chunks=chunks)
    _check_ranges(name, tensor, file_sizes)
    _expect(fills(shape, tensor.offsets, tensor.sizes), f"chunks that fill {name}, each part of it once")
    return tensor


def _check_ranges(name: str, tensor: IndexedTensor, file_sizes: npt.NDArray[np.int64]) -> None:
    chunks, offsets, sizes = tensor.chunks, tensor.offsets, tensor.sizes
    _expect((chunks >= 0).all(), f"chunks of {name} without negative numbers")
    # Differences, because a sum could be larger than 64 bits.
    inside = (sizes <= np.array(tensor.shape, np.int64) - offsets).all()
    _expect(inside, f"chunks inside of {name}")
    _expect((chunks[:, FILE] < len(file_sizes)).all(), f"the files of {name}")
    _expect((chunks[:, BYTES] == sizes.prod(axis=1) * ITEM_BYTES[tensor.dtype]).all(), f"the bytes of {name}")
    if len(chunks):
        ends = file_sizes[chunks[:, FILE]] - chunks[:, START]
        _expect((chunks[:, BYTES] <= ends).all(), f"bytes of {name} inside of their file")


def _fields(node: Any, what: str, names: Sequence[str]) -> Mapping[str, Any]:
    fields = _mapping(node, what)
    unknown = next((name for name in fields if name not in names), None)
    _expect(unknown is None, f"the known keys alone in {what} ({str(unknown)[:40]!r} is none)")
    missing = next((name for name in names if name not in fields), None)
    _expect(missing is None, f"{missing} in {what}")
    return fields


def _mapping(node: Any, what: str) -> dict[str, Any]:
    if not isinstance(node, dict):
        raise DamagedFile(f"lacks a mapping for {what}")
    return node


def _count(node: Any) -> int:
    _expect(type(node) is int and 0 <= node < 1 << 62, "a whole number from 0")
    return int(node)


def _expect(condition: object, wanted: str) -> None:
    if not condition:
        raise DamagedFile(f"lacks {wanted}")
