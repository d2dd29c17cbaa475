"""Arithmetic of boxes: whether chunks fill a tensor, and which bytes a part of a chunk needs."""

import itertools
import random

import numpy as np
import pytest

from titanlab.checkpoint.index_reader import fills, needed_spans, overlap


def boxes(shape, cuts):
    """A grid of boxes: offsets and sizes, cut at the given places of each dim."""
    edges = [sorted({0, size, *places}) for size, places in zip(shape, cuts, strict=True)]
    ranges = [list(itertools.pairwise(edge)) for edge in edges]
    grid = list(itertools.product(*ranges))
    offsets = np.array([[low for low, _ in box] for box in grid], np.int64).reshape(len(grid), len(shape))
    sizes = np.array([[high - low for low, high in box] for box in grid], np.int64).reshape(len(grid), len(shape))
    return offsets, sizes


GRIDS = [
    ((), ()),
    ((7,), ([],)),
    ((7,), ([2, 5],)),
    ((4, 6), ([1, 3], [])),
    ((4, 6), ([], [2])),
    ((4, 6), ([1, 3], [2, 5])),
    ((3, 4, 5), ([1], [2], [3])),
]


@pytest.mark.parametrize(("shape", "cuts"), GRIDS)
def test_a_grid_fills_its_tensor_and_nothing_else_does(shape, cuts):
    offsets, sizes = boxes(shape, cuts)
    assert fills(shape, offsets, sizes)
    order = np.random.default_rng(0).permutation(len(offsets))
    assert fills(shape, offsets[order], sizes[order])
    assert not fills(shape, offsets[1:], sizes[1:])
    assert not fills(shape, np.concatenate([offsets, offsets[:1]]), np.concatenate([sizes, sizes[:1]]))
    for box, dim in itertools.product(range(len(offsets)), range(len(shape))):
        smaller = sizes.copy()
        smaller[box, dim] -= 1
        assert not fills(shape, offsets, smaller)


def test_boxes_that_are_no_grid():
    offsets = np.array([[0, 0], [0, 2], [1, 0], [2, 1], [1, 2]])
    sizes = np.array([[1, 2], [1, 1], [2, 1], [1, 2], [1, 1]])
    # The middle is missing; then it is there; then it hides a hole elsewhere with equal elements.
    assert not fills((3, 3), offsets, sizes)
    middle = np.array([[1, 1]]), np.array([[1, 1]])
    assert fills((3, 3), np.concatenate([offsets, middle[0]]), np.concatenate([sizes, middle[1]]))
    assert not fills((3, 3), np.concatenate([offsets, [[0, 0]]]), np.concatenate([sizes, middle[1]]))


def test_empty_parts_and_empty_tensors_count_for_nothing():
    assert fills((4,), np.array([[0], [4], [2]]), np.array([[2], [0], [2]]))
    assert fills((0, 5), np.zeros((1, 2), np.int64), np.array([[0, 5]]))
    assert fills((0, 5), np.zeros((0, 2), np.int64), np.zeros((0, 2), np.int64))
    assert not fills((3, 5), np.zeros((0, 2), np.int64), np.zeros((0, 2), np.int64))


def test_overlapping_bytes_of_one_file_are_found():
    assert not overlap(np.array([[0, 0, 4], [0, 4, 4], [1, 2, 4], [0, 3, 0]]))
    assert overlap(np.array([[0, 5, 4], [0, 2, 4]]))


@pytest.mark.parametrize("gap", [1, 8, 40, 10**6])
def test_spans_hold_the_part_and_skip_wide_gaps(gap):
    rng = random.Random(gap)
    for _ in range(200):
        dims = rng.randint(0, 4)
        sizes = [rng.randint(1, 5) for _ in range(dims)]
        offsets = [rng.randrange(size) for size in sizes]
        lengths = [rng.randint(1, size - at) for size, at in zip(sizes, offsets, strict=True)]
        numbers = np.arange(int(np.prod(sizes, initial=1))).reshape(sizes)
        part = numbers[tuple(slice(at, at + length) for at, length in zip(offsets, lengths, strict=True))]
        wanted = {4 * int(number) + byte for number in part.reshape(-1) for byte in range(4)}
        spans = needed_spans(sizes, offsets, lengths, 4, gap)
        covered = [byte for first, end in spans for byte in range(first, end)]
        assert len(covered) == len(set(covered))
        assert wanted <= set(covered)
        # No range of unneeded bytes is as wide as the gap.
        extra = sorted(set(covered) - wanted)
        runs = [list(group) for _, group in itertools.groupby(enumerate(extra), lambda pair: pair[1] - pair[0])]
        assert all(len(run) < gap for run in runs)
    assert needed_spans([3, 4], [0, 0], [2, 0], 4, gap) == []
