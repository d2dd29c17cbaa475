"""The training stream and the held-out rows of token shards, whose sequences are numbered."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from titanlab.data.rules import check_sequences, check_validation
from titanlab.data.shards.index import Index
from titanlab.data.shards.split import Split
from titanlab.data.streams.permutation import shuffled
from titanlab.data.streams.stream import IGNORE, Batch, State, check_state

_AHEAD = 1024


class IndexedStream:
    """Sequences of a split in a seeded order, which differs from epoch to epoch.

    Args:
        split: at least one sequence.
        fingerprint: of the data; part of the state.
        seed: of the order.
        global_batch: sequences of one step, over all ranks; a multiple of `ranks`.
        rank, ranks: this data-parallel rank, and the number of data-parallel ranks.
        state: a merged state to resume from, of any number of ranks and any global batch.
    """

    def __init__(
        self,
        split: Split,
        *,
        fingerprint: str,
        seed: int,
        global_batch: int,
        rank: int,
        ranks: int,
        state: State | None = None,
    ) -> None:
        self._split = split
        self._identity = {"fingerprint": fingerprint, "seed": seed, "seq_len": split.seq_len}
        self._samples = 0
        if state is not None:
            check_state(state, **self._identity)
            self._samples = int(state["samples"])
        self._seed, self._global_batch = seed, global_batch
        self._order = _RankOrder(self._samples, global_batch=global_batch, rank=rank, ranks=ranks)
        self._local = global_batch // ranks
        self._ahead = np.empty(0, dtype=np.int64)
        self._at = 0

    def next_batch(self) -> Batch:
        """This rank's sequences of the next step, int64 `[global_batch / ranks, seq]`."""
        if self._at == len(self._ahead):
            # Computing the order of many steps costs little more than that of one step.
            samples = self._order.next(max(1, _AHEAD // self._local))
            self._ahead = shuffled(samples, seed=self._seed, n=self._split.sequences)
            self._at = 0
        chosen = self._ahead[self._at : self._at + self._local]
        self._at += self._local
        self._samples += self._global_batch
        return self._split.gather(chosen)

    def state(self) -> State:
        """The number of samples that all ranks together have taken; the same on every rank."""
        return {**self._identity, "samples": self._samples}

    def close(self) -> None:
        """Nothing is read ahead."""


class _RankOrder:
    """The global samples g with g % ranks == rank, from `start` on, step by step."""

    def __init__(self, start: int, *, global_batch: int, rank: int, ranks: int) -> None:
        self._next, self._ranks = start + (rank - start) % ranks, ranks
        self._local = global_batch // ranks

    def next(self, steps: int) -> npt.NDArray[np.int64]:
        """Samples of the next `steps` steps, int64 `[steps · local]`."""
        count = steps * self._local
        samples = self._next + self._ranks * np.arange(count, dtype=np.int64)
        self._next += self._ranks * count
        return samples


def rank_samples(start: int, *, global_batch: int, rank: int, ranks: int) -> range:
    """Global samples of one rank in the step that begins at sample `start`."""
    return range(start + (rank - start) % ranks, start + global_batch, ranks)


class HeldOutRows:
    """Rows of a validation split, spread evenly over it; see `stream.Rows`.

    Args:
        split: of held-out tokens.
        sequences: number of rows over all ranks; fewer if the split has fewer.
        rank, ranks: row j belongs to rank j % ranks. Every rank has the same number of rows: if `ranks` does not
            divide them, the last rows are padding, with `IGNORE` as every label.
    """

    def __init__(self, split: Split, *, sequences: int, rank: int, ranks: int) -> None:
        available = split.padded_rows()
        rows = min(sequences, available)
        self._split = split
        self._rows: list[int | None] = [row * available // rows for row in range(rank, rows, ranks)]
        self._rows += [None] * (-(-rows // ranks) - len(self._rows))

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        seq_len = self._split.seq_len
        for row in self._rows:
            if row is None:
                yield np.zeros(seq_len, dtype=np.int64), np.full(seq_len, IGNORE, dtype=np.int64)
            else:
                yield self._split.padded_row(row)


def open_train(
    folder: Path,
    index: Index,
    *,
    fingerprint: str,
    seed: int,
    seq_len: int,
    global_batch: int,
    rank: int,
    ranks: int,
    state: State | None,
) -> IndexedStream:
    """The training stream of a folder of token shards.

    Raises:
        ConfigError: the shards have less than one sequence, or `state` belongs to other data.
    """
    check_sequences(index, seq_len)
    split = Split(folder, index, "train", seq_len)
    return IndexedStream(
        split, fingerprint=fingerprint, seed=seed, global_batch=global_batch, rank=rank, ranks=ranks, state=state
    )


def open_validation(
    folder: Path, index: Index, *, seq_len: int, sequences: int, rank: int, ranks: int, key: str, value: object
) -> HeldOutRows:
    """The held-out rows of a folder of token shards.

    Raises:
        ConfigError: nothing was held out.
    """
    check_validation(index, key, value)
    return HeldOutRows(Split(folder, index, "validation", seq_len), sequences=sequences, rank=rank, ranks=ranks)
