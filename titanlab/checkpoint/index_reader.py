"""Reads index.json of a checkpoint. It may come from an untrusted source: every value's type and range is checked."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from titanlab.checkpoint.address_schema import Place
from titanlab.checkpoint.blocks import DamagedFile, blocks_of, checksum, one_line, read_regular
from titanlab.checkpoint.folders import INDEX
from titanlab.checkpoint.index import (
    BYTES,
    FILE,
    FIRST_OFFSET,
    FORMAT,
    ITEM_BYTES,
    START,
    CheckpointIndex,
    IndexedFile,
    IndexedTensor,
    OtherFormat,
)
from titanlab.checkpoint.typed_files import FormatOnly, IndexEntry, IndexFile, parsed

Ints = npt.NDArray[np.int64]
# Layouts cut a tensor along one or two dims.
_MOST_CUT_DIMS = 6


def fills(shape: Sequence[int], offsets: Ints, sizes: Ints) -> bool:
    """Whether boxes inside of a tensor cover each element of it exactly once.

    Args:
        offsets, sizes: [box, dims], all inside of `shape`.
    """
    whole = np.array(shape, np.int64)
    # A rank whose part of a tensor is empty saves a box without elements.
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
    """Whether boxes add up to the whole box.

    The mixed difference of a box's indicator is +1 or -1 at its corners and 0 elsewhere. A sum of indicators equals
    the indicator of the whole box exactly if their mixed differences do.
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
        sizes: of the chunk.
        offsets, lengths: of the part.
        gap: ranges may include bytes between them that are fewer than this.

    Returns:
        first byte and end of each range, from the beginning of the chunk.
    """
    if 0 in lengths:
        return []
    strides = [item_bytes * math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
    # Bytes from the first to the last element of the part, for each number of leading dims that are fixed.
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


# The index of a checkpoint of 405B parameters over 512 ranks has about a fifth of this size.
MOST_BYTES = 1 << 29
# Prevents overflow of 64 bits in the arithmetic of offsets.
_MOST_TENSOR_BYTES = 1 << 60
_PREFIX = re.compile(rb'\{"checksum":"([0-9a-f]{16})",')


def read_index(checkpoint: Place) -> CheckpointIndex:
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
        index = parsed(content, IndexFile, INDEX)
    except DamagedFile:
        with contextlib.suppress(DamagedFile):
            _check_format(parsed(content, FormatOnly, INDEX).format)
        raise
    _check_format(index.format)
    files = []
    for file in index.files:
        _expect(len(file.checksums) == 8 * blocks_of(file.size), f"one checksum for each block of {file.name}")
        checksums = np.frombuffer(file.checksums, "<u8").tolist()
        files.append(IndexedFile(name=file.name, size=file.size, checksums=checksums))
    _expect(len({file.name for file in files}) == len(files), "files of different names")
    _expect(not index.objects.keys() & index.tensors.keys(), "different names of tensors and objects")
    sizes = np.array([file.size for file in files], np.int64)
    tensors = {name: _tensor(name, tensor, sizes) for name, tensor in index.tensors.items()}
    ranges = [tensor.chunks[:, :FIRST_OFFSET] for tensor in tensors.values()]
    _expect(not ranges or not overlap(np.concatenate(ranges)), "chunks whose bytes are apart")
    return CheckpointIndex(
        position_bytes=index.position.size,
        position_checksum=int(index.position.checksum, 16),
        objects=index.objects,
        tensors=tensors,
        files=files,
    )


def _check_format(version: int) -> None:
    if version != FORMAT:
        raise OtherFormat(f"has the format {version}, and this version of titanlab reads {FORMAT}")


def _tensor(name: str, entry: IndexEntry, file_sizes: Ints) -> IndexedTensor:
    dims = len(entry.shape)
    _expect(entry.dtype in ITEM_BYTES, "a dtype")
    item_bytes = ITEM_BYTES[entry.dtype]
    # Sizes of 0 are left out, so that no partial product is too large.
    _expect(math.prod(size or 1 for size in entry.shape) * item_bytes < _MOST_TENSOR_BYTES, f"a size of {name}")
    _expect(set(map(len, entry.chunks)) <= {FIRST_OFFSET + 2 * dims}, f"chunks of {name} of its dimensions")
    chunks = np.array(entry.chunks, np.int64).reshape(len(entry.chunks), FIRST_OFFSET + 2 * dims)
    tensor = IndexedTensor(dtype=entry.dtype, shape=tuple(entry.shape), chunks=chunks)
    offsets, sizes = tensor.offsets, tensor.sizes
    # Differences, because a sum could be larger than 64 bits.
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
