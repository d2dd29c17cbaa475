"""Sequences from memory-mapped token shards, read many at a time."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from titanlab.data.documents import Separators
from titanlab.data.shards.index import INDEX, Index
from titanlab.data.streams.stream import IGNORE, Batch
from titanlab.errors import ConfigError

_CHECKED_TOKENS = 1 << 20


def check_tokens(folder: Path, index: Index, key: str = "data.folder") -> None:
    """Check that the first 2^20 tokens of every file are below `vocab_size`.

    Raises:
        ConfigError: a token is not.
    """
    for shard in (*index.train, *index.validation):
        first = np.fromfile(folder / shard.file, dtype=_stored(index), count=min(shard.tokens, _CHECKED_TOKENS))
        if first.size and int(first.max()) >= index.vocab_size:
            raise ConfigError(
                key,
                folder / shard.file,
                f"has token {int(first.max())}, and {INDEX} says vocab_size {index.vocab_size}",
                "check dtype and vocab_size in the index",
            )


def check_documents(folder: Path, index: Index, separators: Separators, key: str) -> None:
    """Check that a document ends in the first 2^20 tokens of at least one file.

    Raises:
        ConfigError: it does not, so that the tokens named in the index are not those that separate documents.
    """
    for shard in (*index.train, *index.validation):
        first = np.fromfile(folder / shard.file, dtype=_stored(index), count=min(shard.tokens, _CHECKED_TOKENS))
        if first.size and separators.starts(first[None].astype(np.int64)).any():
            return
    rule = f"no document ends in the first {_CHECKED_TOKENS:,} tokens of any file"
    cure = f"check bos_id={index.bos_id} and eos_id={index.eos_id} in {INDEX}, or try false"
    raise ConfigError(key, True, rule, cure)


class Split:
    """The sequences of `train` or `validation` in memory-mapped files.

    Sequence i of a file covers its tokens [i·seq, (i+1)·seq]; the last of them is a label only. The remaining tokens
    at a file's end, less than a sequence, are not used.
    """

    def __init__(self, folder: Path, index: Index, name: str, seq_len: int) -> None:
        self.seq_len = seq_len
        self.files = [
            # A plain ndarray view: every indexing of an `np.memmap` costs some microseconds more.
            np.memmap(folder / shard.file, dtype=_stored(index), mode="r").view(np.ndarray)
            for shard in index.split(name)
            if shard.tokens
        ]
        counts = [max(0, len(file) - 1) // seq_len for file in self.files]
        self._tokens = [file[: n * seq_len].reshape(n, seq_len) for file, n in zip(self.files, counts, strict=True)]
        self._labels = [
            file[1 : n * seq_len + 1].reshape(n, seq_len) if n else self._tokens[number]
            for number, (file, n) in enumerate(zip(self.files, counts, strict=True))
        ]
        self._ends = np.cumsum(counts, dtype=np.int64)
        self.sequences = int(sum(counts))

    def gather(self, sequences: npt.NDArray[np.int64]) -> Batch:
        """Read the sequences with the numbers `[k]`: tokens and labels, int64 `[k, seq]` each."""
        if len(self.files) == 1:
            return Batch(_rows(self._tokens[0], sequences), _rows(self._labels[0], sequences))
        tokens = np.empty((len(sequences), self.seq_len), dtype=np.int64)
        labels = np.empty_like(tokens)
        files = np.searchsorted(self._ends, sequences, side="right")
        for file in np.unique(files):
            places = np.flatnonzero(files == file)
            rows = sequences[places] - (self._ends[file] - len(self._tokens[file]))
            tokens[places], labels[places] = self._tokens[file][rows], self._labels[file][rows]
        return Batch(tokens, labels)

    def padded_rows(self) -> int:
        """Number of rows that cover every token that can be a label; the last row of each file is padded."""
        return sum(math.ceil((len(file) - 1) / self.seq_len) for file in self.files if len(file) > 1)

    def padded_row(self, row: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Read one of the `padded_rows`: tokens and labels, int64 `[seq]`; padding has the label `IGNORE`."""
        for file in self.files:
            rows = math.ceil((len(file) - 1) / self.seq_len)
            if row < rows:
                break
            row -= rows
        piece = file[row * self.seq_len : (row + 1) * self.seq_len + 1].astype(np.int64)
        tokens = np.zeros(self.seq_len, dtype=np.int64)
        labels = np.full(self.seq_len, IGNORE, dtype=np.int64)
        tokens[: len(piece) - 1], labels[: len(piece) - 1] = piece[:-1], piece[1:]
        return tokens, labels


def _rows(table: npt.NDArray[Any], numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    rows: npt.NDArray[np.int64] = table.take(numbers, axis=0).astype(np.int64)
    return rows


def _stored(index: Index) -> np.dtype[Any]:
    return np.dtype(index.dtype).newbyteorder("<")
