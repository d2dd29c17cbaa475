"""Chunks of the loss: how large they are by default, and what they need."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titanlab.costs import automatic_chunk, chunk_bytes, part_rows
from titanlab.costs.setting import CHUNK_BYTES, LARGE_BYTES, chunks_of


def test_bytes_of_chunks():
    shape = {"tokens": 4096, "columns": 128_256, "dim": 1024, "accelerator": "cpu"}
    rows = part_rows(128_256, "cpu") * 128_256 * 4
    assert rows <= 2**23
    found = chunk_bytes(**shape, chunk=1024, width=4, compiled=False)
    assert found == 1024 * 128_256 * 4 + rows + 4096 * 1024 * 4
    assert chunk_bytes(**shape, chunk=1024, width=2, compiled=False) == (found - rows) // 2 + 2 * rows
    assert chunk_bytes(**shape, chunk=1024, width=4, compiled=True) == 2 * 1024 * 128_256 * 4 + 4096 * 1024 * 4
    # A chunk is no larger than the microbatch.
    assert chunk_bytes(**shape, chunk=2**20, width=4, compiled=False) == (4096 * 128_256 * 4 + rows + 4096 * 1024 * 4)


@given(tokens=st.integers(1, 2**20), columns=st.integers(1, 2**30))
def test_a_chunk_is_the_largest_power_of_two_within_its_bytes(tokens, columns):
    chunk = automatic_chunk(tokens=tokens, columns=columns)
    assert bool(chunk) == (tokens * columns * 4 > LARGE_BYTES)
    if chunk:
        assert chunk & (chunk - 1) == 0
        assert chunk == 1 or chunk * columns * 4 <= CHUNK_BYTES
        assert 2 * chunk * columns * 4 > CHUNK_BYTES


@given(tokens=st.integers(1, 200), chunk=st.integers(1, 250))
def test_chunks_have_all_tokens(tokens, chunk):
    sizes = chunks_of(tokens, chunk, pads=False)
    assert sum(sizes) == tokens
    assert set(sizes[:-1]) <= {chunk}
    assert 1 <= sizes[-1] <= chunk
    assert chunks_of(tokens, chunk, pads=True) == [chunk] * len(sizes)
    assert chunks_of(tokens, 0, pads=False) == [tokens]


@pytest.mark.parametrize(
    ("columns", "accelerator", "rows"),
    [
        (2**21, "cpu", 1),
        (2**20, "cpu", 2),
        (2**21 + 1, "cpu", 1),
        (2**20, "cuda", 16),
        (2**20, "tpu", 16),
        (1, "cpu", 2**21),
    ],
)
def test_rows_of_a_part_fit_a_cache_or_keep_a_gpu_busy(columns, accelerator, rows):
    assert part_rows(columns, accelerator) == rows
