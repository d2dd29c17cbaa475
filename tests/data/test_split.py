"""Sequences of memory-mapped shards: each token is where it was, and what does not fit the index is named."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from titanlab.data.contract import IGNORE, Separators
from titanlab.data.indexed import Split, check_documents, check_tokens
from titanlab.data.shards import ShardIndex, TokenShard
from titanlab.errors import ConfigError


def made(folder: Path, *files: Sequence[int], dtype: str = "uint16", vocab_size: int = 1000) -> ShardIndex:
    """Files of these tokens."""
    shards = []
    for number, tokens in enumerate(files):
        np.array(tokens, dtype=np.dtype(dtype).newbyteorder("<")).tofile(folder / f"{number}.bin")
        shards.append(TokenShard(file=f"{number}.bin", tokens=len(tokens)))
    return ShardIndex(dtype=dtype, vocab_size=vocab_size, bos_id=1, eos_id=2, train=tuple(shards))


def rows(split: Split, *numbers: int) -> tuple[list[list[int]], list[list[int]]]:
    batch = split.gather(np.array(numbers, dtype=np.int64))
    assert batch.tokens.dtype == batch.labels.dtype == np.int64
    assert batch.tokens.shape == batch.labels.shape == (len(numbers), split.seq_len)
    return batch.tokens.tolist(), batch.labels.tolist()


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_a_label_is_the_next_token(tmp_path: Path, dtype: str) -> None:
    split = Split(tmp_path, made(tmp_path, range(10), dtype=dtype), "train", 3)
    assert split.sequences == 3
    assert rows(split, 0, 1, 2) == ([[0, 1, 2], [3, 4, 5], [6, 7, 8]], [[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    # In any order, and one of them twice.
    assert rows(split, 2, 0, 2) == ([[6, 7, 8], [0, 1, 2], [6, 7, 8]], [[7, 8, 9], [1, 2, 3], [7, 8, 9]])
    assert rows(split) == ([], [])


def test_sequences_of_several_files_have_one_numbering(tmp_path: Path) -> None:
    index = made(tmp_path, range(7), [50], [], range(100, 109), range(200, 203), range(300, 304))
    split = Split(tmp_path, index, "train", 3)
    # Files of 2, 0, 0, 2, 0 and 1 sequences.
    assert split.sequences == 5
    expected = [[0, 1, 2], [3, 4, 5], [100, 101, 102], [103, 104, 105], [300, 301, 302]]
    assert rows(split, 0, 1, 2, 3, 4) == (expected, [[each + 1 for each in row] for row in expected])
    assert rows(split, 4, 1, 2)[0] == [expected[4], expected[1], expected[2]]


def test_large_tokens_are_kept(tmp_path: Path) -> None:
    split = Split(tmp_path, made(tmp_path, [65535, 65534], dtype="uint16"), "train", 1)
    assert rows(split, 0) == ([[65535]], [[65534]])
    big = Split(tmp_path, made(tmp_path, [2**32 - 1, 2**31], dtype="uint32"), "train", 1)
    assert rows(big, 0) == ([[2**32 - 1]], [[2**31]])


def test_a_split_of_nothing_has_no_sequence(tmp_path: Path) -> None:
    for index in (ShardIndex(dtype="uint16", vocab_size=9), made(tmp_path, []), made(tmp_path, range(3))):
        split = Split(tmp_path, index, "train", 3)
        assert split.sequences == 0
    assert Split(tmp_path, made(tmp_path, range(3)), "validation", 3).padded_rows() == 0


def test_padded_rows_have_every_label_once(tmp_path: Path) -> None:
    split = Split(tmp_path, made(tmp_path, range(6), [50], range(100, 104)), "train", 3)
    assert split.padded_rows() == 3
    found = [split.padded_row(number) for number in range(3)]
    assert [tokens.tolist() for tokens, _ in found] == [[0, 1, 2], [3, 4, 0], [100, 101, 102]]
    assert [labels.tolist() for _, labels in found] == [[1, 2, 3], [4, 5, IGNORE], [101, 102, 103]]
    assert {part.dtype for row in found for part in row} == {np.dtype(np.int64)}


def test_a_token_beyond_the_vocabulary_is_named(tmp_path: Path) -> None:
    check_tokens(tmp_path, made(tmp_path, [5, 9], [], vocab_size=10))
    index = made(tmp_path, [5, 9], [7, 10, 3], vocab_size=10)
    with pytest.raises(ConfigError) as caught:
        check_tokens(tmp_path, index, "k")
    said = "has token 10, and index.json says vocab_size 10; check dtype and vocab_size in the index"
    assert str(caught.value) == f"k={tmp_path / '1.bin'}: {said}"


def test_documents_must_end_somewhere(tmp_path: Path) -> None:
    both = Separators(begin=1, end=2)
    check_documents(tmp_path, made(tmp_path, [5, 5, 5], [], [5, 2, 1, 5]), both, "k")
    for files in ([], [[]], [[5, 5], [5, 5, 5]]):
        with pytest.raises(ConfigError) as caught:
            check_documents(tmp_path, made(tmp_path, *files), both, "k")
        assert str(caught.value) == (
            "k=true: no document ends in the first 1,048,576 tokens of any file; "
            "check bos_id=1 and eos_id=2 in index.json, or try false"
        )
