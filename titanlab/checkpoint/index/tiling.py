"""Arithmetic of boxes and ranges: do the chunks of a tensor fill it, and are their bytes apart?"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

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
