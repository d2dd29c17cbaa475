"""index.json of a checkpoint: where the bytes of each tensor are, and the checksums of all files.

    {"checksum": "…",                      of all bytes that follow this key's comma
     "format": 1,
     "position": {"bytes": 812, "checksum": "…"},
     "objects": {"optimizer.state.x": 3},  entries that are not tensors
     "tensors": {"model.norm.weight": {"dtype": "float32", "shape": [64], "chunks": [[0, 192, 256, 0, 64]]}},
     "files": [{"name": "rank-00000.safetensors", "bytes": 448, "checksums": "…"}]}

A chunk is `[file, first byte, bytes, *offsets, *sizes]`; the chunks of a tensor fill it without overlap. `checksums`
has eight bytes for each block of 1 MiB, little-endian, as base64. The file may come from a stranger: msgspec checks
types and ranges while it parses. Free of torch.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from titanlab.checkpoint.address_schema import Place
from titanlab.checkpoint.storage import (
    INDEX,
    ITEM_BYTES,
    DamagedFile,
    blocks_of,
    checksum,
    folder_at,
    one_line,
    parsed,
)

Ints = npt.NDArray[np.int64]
# The limit keeps arithmetic with offsets within 64 bits.
_Size = Annotated[int, Meta(ge=0, lt=1 << 62)]
# Largest size of an index: about five times that of a checkpoint of 405B parameters over 512 ranks.
MOST_BYTES = 1 << 29
_MOST_TENSOR_BYTES = 1 << 60
_PREFIX = re.compile(rb'\{"checksum":"([0-9a-f]{16})",')
# Largest number of dims along which a tensor may be cut; layouts cut along one or two.
_MOST_CUT_DIMS = 6

FORMAT = 1

FILE, START, BYTES, FIRST_OFFSET = range(4)
"""Columns of a chunk."""


@dataclass(frozen=True, kw_only=True)
class IndexedTensor:
    """A tensor in a checkpoint.

    Attributes:
        dtype: name of the dtype in torch.
        shape: shape of the full tensor.
        chunks: [chunk, 3 + 2 * dims], with the columns that the index has.
    """

    dtype: str
    shape: tuple[int, ...]
    chunks: Ints

    @property
    def offsets(self) -> Ints:
        """Where each chunk begins in the tensor: [chunk, dims]."""
        return self.chunks[:, FIRST_OFFSET : FIRST_OFFSET + len(self.shape)]

    @property
    def sizes(self) -> Ints:
        """The shape of each chunk: [chunk, dims]."""
        return self.chunks[:, FIRST_OFFSET + len(self.shape) :]


class IndexedFile(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """A file of tensors; `checksums` are those that `BlockWriter` computed."""

    # The name must not lead out of the checkpoint's folder, because the file is opened later.
    name: Annotated[str, Meta(pattern=r"^rank-[0-9]{5,9}\.safetensors\Z")]
    size: _Size = msgspec.field(name="bytes")
    checksums: bytes


class PositionSum(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Size and checksum of position.json."""

    size: _Size = msgspec.field(name="bytes")
    checksum: Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]

    @classmethod
    def of(cls, content: bytes) -> PositionSum:
        """Compute size and checksum from the content of position.json."""
        return cls(size=len(content), checksum=f"{checksum(content):016x}")


class IndexEntry(Struct, forbid_unknown_fields=True):
    """A tensor in index.json; `IndexedTensor` explains the fields."""

    dtype: str
    shape: Annotated[list[_Size], Meta(max_length=32)]
    chunks: list[list[_Size]]


class IndexFile(Struct, forbid_unknown_fields=True):
    """The content of index.json."""

    checksum: str
    format: int
    position: PositionSum
    objects: dict[str, Any]
    tensors: dict[str, IndexEntry]
    files: list[IndexedFile]


class _FormatOnly(Struct):
    format: int


class OtherFormat(Exception):
    """The checkpoint has a format that this version does not know; it need not be damaged."""


def index_bytes(
    *, position: bytes, objects: dict[str, Any], tensors: dict[str, IndexEntry], files: Sequence[IndexedFile]
) -> bytes:
    """The bytes of index.json; `position` is the content of position.json."""
    content = IndexFile("", FORMAT, PositionSum.of(position), objects, tensors, list(files))
    return signed(msgspec.json.encode(content).replace(b'"checksum":"",', b"", 1))


def signed(content: bytes) -> bytes:
    """Add a checksum to the text of a JSON object, as its first key."""
    return b'{"checksum":"%016x",' % checksum(content[1:]) + content[1:]


def fills(shape: Sequence[int], offsets: Ints, sizes: Ints) -> bool:
    """Whether boxes cover each element of a tensor exactly once.

    Args:
        offsets, sizes: of each box, which must lie inside the tensor: [box, dims].
    """
    whole = np.array(shape, np.int64)
    # Ignore boxes without elements: a rank whose part of a tensor is empty saves such a box.
    holds = sizes.all(axis=1)
    offsets, sizes = offsets[holds], sizes[holds]
    if not whole.all():
        return True
    cut = [dim for dim in range(len(whole)) if not (sizes[:, dim] == whole[dim]).all()]
    if not cut:
        return len(sizes) == 1
    if len(cut) == 1:
        starts, ends = offsets[:, cut[0]], offsets[:, cut[0]] + sizes[:, cut[0]]
        order = np.argsort(starts)
        starts, ends = starts[order], ends[order]
        return bool(starts[0] == 0 and ends[-1] == whole[cut[0]] and (starts[1:] == ends[:-1]).all())
    return len(cut) <= _MOST_CUT_DIMS and _corners_cancel(whole[cut], offsets[:, cut], sizes[:, cut])


def _corners_cancel(whole: Ints, offsets: Ints, sizes: Ints) -> bool:
    """Whether boxes cover each element of the whole box exactly once.

    A box's indicator is a function: 1 at each element of the box, 0 elsewhere. Its mixed difference is +1 or -1 at the
    box's corners and 0 elsewhere. The boxes' indicators add up to the whole box's exactly if their differences do.
    """
    dims = len(whole)
    lows = np.concatenate([offsets, np.zeros((1, dims), np.int64)])
    highs = np.concatenate([offsets + sizes, whole[None]])
    weights = np.ones(len(lows), np.int64)
    weights[-1] = -1
    corners, signs = [], []
    for sides in itertools.product((False, True), repeat=dims):
        corners.append(np.where(np.array(sides), highs, lows))
        signs.append(weights * (-1) ** sum(sides))
    points, signed = np.concatenate(corners), np.concatenate(signs)
    keys, count = np.zeros(len(points), np.int64), 1
    for dim in range(dims):
        values, numbers = np.unique(points[:, dim], return_inverse=True)
        count *= len(values)
        if count >= 1 << 62:
            return False
        keys = keys * len(values) + numbers.reshape(-1)
    _, numbers = np.unique(keys, return_inverse=True)
    return not np.bincount(numbers.reshape(-1), weights=signed).any()


def overlap(ranges: Ints) -> bool:
    """Whether two ranges of bytes in one file overlap.

    Args:
        ranges: [range, 3]: file, first byte, bytes.
    """
    ranges = ranges[ranges[:, 2] > 0]
    ranges = ranges[np.lexsort((ranges[:, 1], ranges[:, 0]))]
    before, after = ranges[:-1], ranges[1:]
    return bool(((before[:, 0] == after[:, 0]) & (before[:, 1] + before[:, 2] > after[:, 1])).any())


def needed_spans(
    sizes: Sequence[int], offsets: Sequence[int], lengths: Sequence[int], item_bytes: int, gap: int
) -> list[tuple[int, int]]:
    """The ranges of bytes that hold a part of a chunk whose elements are stored row by row.

    Args:
        sizes: shape of the chunk.
        offsets, lengths: where the part begins in the chunk, and its shape.
        gap: join ranges that have fewer bytes than this between them.

    Returns:
        first byte and end of each range, from the beginning of the chunk.
    """
    if 0 in lengths:
        return []
    strides = [item_bytes * math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
    # For each number of leading dims that are fixed: the bytes from the first to the last element of the part.
    extents = [
        sum((lengths[inner] - 1) * strides[inner] for inner in range(dim, len(sizes))) + item_bytes
        for dim in range(len(sizes) + 1)
    ]
    start = sum(at * stride for at, stride in zip(offsets, strides, strict=True))
    separate = 0
    while separate < len(sizes) and strides[separate] - extents[separate + 1] >= gap:
        separate += 1
    steps = [range(0, lengths[dim] * strides[dim], strides[dim]) for dim in range(separate)]
    return [(start + at, start + at + extents[separate]) for at in map(sum, itertools.product(*steps))]


def read_index(checkpoint: Place) -> tuple[IndexFile, dict[str, IndexedTensor]]:
    """Read and check index.json. Returns its content, and the tensors in it.

    Raises:
        DamagedFile: the file is missing or damaged.
        OtherFormat: a version of titanlab with another format wrote the file.
        OSError: the file cannot be read, but may be undamaged.
    """
    content = folder_at(checkpoint).read(INDEX, MOST_BYTES)
    prefix = _PREFIX.match(content)
    if prefix is None:
        raise DamagedFile(f"its file {INDEX} is not an index of a checkpoint")
    if checksum(memoryview(content)[prefix.end() :]) != int(prefix[1], 16):
        raise DamagedFile(f"its file {INDEX} has other bytes than were saved")
    version = parsed(content, _FormatOnly, INDEX).format
    if version != FORMAT:
        raise OtherFormat(f"has the format {version}, and this version of titanlab reads {FORMAT}")
    index = parsed(content, IndexFile, INDEX)
    files = index.files
    for file in files:
        _expect(len(file.checksums) == 8 * blocks_of(file.size), f"one checksum for each block of {file.name}")
    _expect(len({file.name for file in files}) == len(files), "a different name for each file")
    _expect(not index.objects.keys() & index.tensors.keys(), "different names for tensors and objects")
    return index, check_tensors(index.tensors, [file.size for file in files])


def check_tensors(entries: Mapping[str, IndexEntry], file_sizes: Sequence[int]) -> dict[str, IndexedTensor]:
    """Check that the chunks of each tensor fill the tensor, lie inside their files, and share no bytes."""
    sizes = np.array(file_sizes, np.int64)
    tensors = {name: _tensor(name, entry, sizes) for name, entry in entries.items()}
    ranges = [tensor.chunks[:, :FIRST_OFFSET] for tensor in tensors.values()]
    _expect(not ranges or not overlap(np.concatenate(ranges)), "separate bytes for each chunk")
    return tensors


def _tensor(name: str, entry: IndexEntry, file_sizes: Ints) -> IndexedTensor:
    dims = len(entry.shape)
    _expect(entry.dtype in ITEM_BYTES, "a dtype")
    item_bytes = ITEM_BYTES[entry.dtype]
    # Count a size of 0 as 1: products of the other sizes, which the code below computes, must not overflow either.
    _expect(math.prod(size or 1 for size in entry.shape) * item_bytes < _MOST_TENSOR_BYTES, f"a size of {name}")
    wanted = f"chunks of {name} with as many dimensions as its shape"
    _expect(set(map(len, entry.chunks)) <= {FIRST_OFFSET + 2 * dims}, wanted)
    chunks = np.array(entry.chunks, np.int64).reshape(len(entry.chunks), FIRST_OFFSET + 2 * dims)
    tensor = IndexedTensor(dtype=entry.dtype, shape=tuple(entry.shape), chunks=chunks)
    offsets, sizes = tensor.offsets, tensor.sizes
    # Compare with a difference, because the sum of offset and size could exceed 64 bits.
    inside = (sizes <= np.array(tensor.shape, np.int64) - offsets).all()
    _expect(inside, f"chunks inside of {name}")
    _expect((chunks[:, FILE] < len(file_sizes)).all(), f"the files of {name}")
    _expect((chunks[:, BYTES] == sizes.prod(axis=1) * item_bytes).all(), f"the bytes of {name}")
    if len(chunks):
        ends = file_sizes[chunks[:, FILE]] - chunks[:, START]
        _expect((chunks[:, BYTES] <= ends).all(), f"bytes of {name} inside of their file")
    _expect(fills(tensor.shape, offsets, sizes), f"chunks that fill {name}, each part of it once")
    return tensor


def _expect(condition: object, wanted: str) -> None:
    if not condition:
        raise DamagedFile(f"its file {INDEX} lacks {one_line(wanted)}")
