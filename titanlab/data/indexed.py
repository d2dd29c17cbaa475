"""Reads token shards as numbered sequences, in an order that the seed decides: for training and for validation.

The order is a permutation of n numbers. It is computed where it is needed and never stored. A Feistel network over the
pairs (left, right) of Z_a × Z_b with a·b ≥ n is applied until its result is below n (cycle walking): Black and Rogaway,
"Ciphers with arbitrary finite domains" (CT-RSA 2002). The round function is the finaliser of splitmix64 (Steele, Lea
and Flood, OOPSLA 2014).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from titanlab.data.contract import IGNORE, Batch, SampleStream, Separators
from titanlab.data.shards import INDEX, ShardIndex
from titanlab.errors import ConfigError

_CHECKED_TOKENS = 1 << 20

Numbers = npt.NDArray[np.int64]
Row = tuple[Numbers, Numbers]


def check_tokens(folder: Path, index: ShardIndex, key: str = "data.folder") -> None:
    """Check that the first 2^20 tokens of every file are below `vocab_size`."""
    for file, first in _beginnings(folder, index):
        if int(first.max()) >= index.vocab_size:
            rule = f"has token {int(first.max())}, and {INDEX} says vocab_size {index.vocab_size}"
            raise ConfigError(key, file, rule, "check dtype and vocab_size in the index")


def check_documents(folder: Path, index: ShardIndex, separators: Separators, key: str) -> None:
    """Check that a document ends in the first 2^20 tokens of at least one file."""
    if any(separators.starts(first[None].astype(np.int64)).any() for _, first in _beginnings(folder, index)):
        return
    rule = f"no document ends in the first {_CHECKED_TOKENS:,} tokens of any file"
    cure = f"check bos_id={index.bos_id} and eos_id={index.eos_id} in {INDEX}, or try false"
    raise ConfigError(key, True, rule, cure)


def _beginnings(folder: Path, index: ShardIndex) -> Iterator[tuple[Path, npt.NDArray[Any]]]:
    """The first 2^20 tokens of every file that is not empty."""
    for shard in index.shards:
        count = min(shard.tokens, _CHECKED_TOKENS)
        if count:
            yield folder / shard.file, np.fromfile(folder / shard.file, dtype=_stored(index), count=count)


class Split:
    """The sequences of `train` or `validation` in memory-mapped files.

    Sequence i of a file has the tokens i·seq to (i+1)·seq, of which the last is only a label. The tokens that remain at
    a file's end, fewer than a sequence, are not used for training.
    """

    def __init__(self, folder: Path, index: ShardIndex, name: str, seq_len: int) -> None:
        self.seq_len = seq_len
        self.files = [
            # Use plain ndarray views: indexing an `np.memmap` takes some microseconds more each time.
            np.memmap(folder / shard.file, dtype=_stored(index), mode="r").view(np.ndarray)
            for shard in index.split(name)
            if shard.tokens
        ]
        # For each file, the tokens and the labels of its sequences, `[sequences, seq]` each.
        self._tables = []
        for file in self.files:
            n = (len(file) - 1) // seq_len
            tokens = file[: n * seq_len].reshape(n, seq_len)
            self._tables.append((tokens, file[1 : n * seq_len + 1].reshape(n, seq_len) if n else tokens))
        self._ends = np.cumsum([len(tokens) for tokens, _ in self._tables], dtype=np.int64)
        self.sequences = int(self._ends[-1]) if self.files else 0
        # For each file, the number of rows that cover every token that can be a label; a file's last row is padded.
        self._rows = [math.ceil((len(file) - 1) / seq_len) for file in self.files]

    def gather(self, sequences: npt.NDArray[np.int64]) -> Batch:
        """Read the sequences with the numbers `[k]`: tokens and labels, int64 `[k, seq]` each."""
        if len(self.files) == 1:
            tokens, labels = (table.take(sequences, axis=0).astype(np.int64) for table in self._tables[0])
            return Batch(tokens, labels)
        found = np.empty((2, len(sequences), self.seq_len), dtype=np.int64)
        files = np.searchsorted(self._ends, sequences, side="right")
        for file in np.unique(files):
            places = np.flatnonzero(files == file)
            rows = sequences[places] - (self._ends[file] - len(self._tables[file][0]))
            for part, table in zip(found, self._tables[file], strict=True):
                part[places] = table[rows]
        return Batch(found[0], found[1])

    def padded_rows(self) -> int:
        return sum(self._rows)

    def padded_row(self, row: int) -> Row:
        """Read one of the `padded_rows`: tokens and labels, int64 `[seq]`; padding has the label `IGNORE`."""
        number = 0
        while row >= self._rows[number]:
            row, number = row - self._rows[number], number + 1
        piece = self.files[number][row * self.seq_len : (row + 1) * self.seq_len + 1].astype(np.int64)
        tokens = np.zeros(self.seq_len, dtype=np.int64)
        labels = np.full(self.seq_len, IGNORE, dtype=np.int64)
        tokens[: len(piece) - 1], labels[: len(piece) - 1] = piece[:-1], piece[1:]
        return tokens, labels


def _stored(index: ShardIndex) -> np.dtype[Any]:
    return np.dtype(index.dtype).newbyteorder("<")


U64 = npt.NDArray[np.uint64]

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_HALF_ROUNDS = 8


def mix(x: U64) -> U64:
    """The finaliser of splitmix64, a bijection on 64-bit integers; `x` has any shape and is not changed."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def keyed(seed: int, numbers: npt.NDArray[Any]) -> U64:
    """A 64-bit hash of (seed, number) for each number; same shape as `numbers`."""
    start = mix(np.array([(seed + 1) * _GOLDEN & _MASK], dtype=np.uint64))
    return mix(numbers.astype(np.uint64) * np.uint64(_GOLDEN) + start)


def shuffled(samples: npt.NDArray[np.int64], *, seed: int, n: int) -> npt.NDArray[np.int64]:
    """Map samples of an endless stream to numbers below n; every epoch of n samples has its own permutation.

    Args:
        samples: int64 `[k]`, sample numbers from 0. Sample g has the place g % n in epoch g // n; n is at least 1.

    Returns:
        int64 `[k]` in [0, n).
    """
    epochs, places = np.divmod(samples, n)
    left_size = math.isqrt(n - 1) + 1
    right_size = -(-n // left_size)
    keys = keyed(seed, epochs)
    numbers = _network(places.astype(np.uint64), keys, left_size, right_size)
    # At most left_size - 1 pairs give numbers of n or more, so the loop runs seldom, and with few numbers.
    while (outside := np.flatnonzero(numbers >= n)).size:
        numbers[outside] = _network(numbers[outside], keys[outside], left_size, right_size)
    return numbers.astype(np.int64)


def _network(x: U64, keys: U64, left_size: int, right_size: int) -> U64:
    a, b = np.uint64(left_size), np.uint64(right_size)
    left, right = x // b, x % b
    for number in range(1, _HALF_ROUNDS, 2):
        left = (left + mix(right + keys * np.uint64(number)) % a) % a
        right = (right + mix(left + keys * np.uint64(number + 2 * _HALF_ROUNDS)) % b) % b
    return left * b + right


_AHEAD = 1024


class NumberedStream(SampleStream):
    """A stream of sequences that have numbers.

    Args:
        order: samples `[k]` → the numbers of their sequences `[k]`.
        read: numbers `[k]` → the tokens and labels of these sequences, `[k, seq]` each.
    """

    def __init__(self, order: Callable[[Numbers], Numbers], read: Callable[[Numbers], Batch], **place: Any) -> None:
        super().__init__(**place)
        self._order, self._read = order, read
        self._next = self._samples + (self._rank - self._samples) % self._ranks
        self._local = self._global_batch // self._ranks
        self._ahead = np.empty(0, dtype=np.int64)

    def next_batch(self) -> Batch:
        if not len(self._ahead):
            # Compute the order of many steps at once: this takes little more time than the order of one step.
            count = max(1, _AHEAD // self._local) * self._local
            samples = self._next + self._ranks * np.arange(count, dtype=np.int64)
            self._next += self._ranks * count
            self._ahead = self._order(samples)
        chosen, self._ahead = self._ahead[: self._local], self._ahead[self._local :]
        self._samples += self._global_batch
        return self._read(chosen)


def rank_samples(start: int, *, global_batch: int, rank: int, ranks: int) -> range:
    """The numbers of one rank's samples in the step whose first sample, over all ranks, is `start`."""
    return range(start + (rank - start) % ranks, start + global_batch, ranks)


class HeldOutRows:
    """This rank's rows for validation, chosen evenly from the available rows; see `contract.Rows`.

    Args:
        read: number of an available row → its tokens and labels, `[seq]` each.
        sequences: number of rows of all ranks together; fewer if fewer rows are available.
        rank, ranks: row j belongs to rank j % ranks. Every rank has the same number of rows: if `ranks` does not
            divide the rows, some ranks get a last row of padding, with `IGNORE` as every label.
    """

    def __init__(
        self, read: Callable[[int], Row], available: int, *, seq_len: int, sequences: int, rank: int, ranks: int
    ) -> None:
        rows = min(sequences, available)
        self._read, self._seq_len = read, seq_len
        self._rows: list[int | None] = [row * available // rows for row in range(rank, rows, ranks)]
        self._rows += [None] * (-(-rows // ranks) - len(self._rows))

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        padding = np.zeros(self._seq_len, dtype=np.int64), np.full(self._seq_len, IGNORE, dtype=np.int64)
        for row in self._rows:
            yield padding if row is None else self._read(row)
