"""Random sequences by number: sample and position alone decide each token."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from titanlab.data.streams.indexed import rank_samples
from titanlab.data.streams.permutation import keyed, mix
from titanlab.data.streams.stream import IGNORE, Batch, State, check_state

_STRIDE = np.uint64(0x9E3779B97F4A7C15)
# Apart from every seed of training, which a config cannot make negative.
_VALIDATION_SEED = -1


def sequences(numbers: npt.NDArray[np.int64], *, seed: int, seq_len: int, vocab_size: int) -> npt.NDArray[np.int64]:
    """Tokens of some sequences and the label after the last: `[k]` to int64 `[k, seq + 1]`."""
    positions = np.arange(1, seq_len + 2, dtype=np.uint64) * _STRIDE
    drawn = mix(keyed(seed, numbers)[:, None] + positions)
    # The upper 32 bits, scaled: even to one part in 2^32 / vocab_size, and cheaper than a remainder.
    return ((drawn >> np.uint64(32)) * np.uint64(vocab_size) >> np.uint64(32)).astype(np.int64)


class RandomStream:
    """An endless stream of random sequences; see `stream.Stream`."""

    def __init__(
        self,
        vocab_size: int,
        *,
        fingerprint: str,
        seed: int,
        seq_len: int,
        global_batch: int,
        rank: int,
        ranks: int,
        state: State | None,
    ) -> None:
        self._facts = {"fingerprint": fingerprint, "seed": seed, "seq_len": seq_len}
        self._samples = 0
        if state is not None:
            check_state(state, **self._facts)
            self._samples = int(state["samples"])
        self._vocab_size, self._seed, self._seq_len = vocab_size, seed, seq_len
        self._global_batch, self._rank, self._ranks = global_batch, rank, ranks

    def next_batch(self) -> Batch:
        """This rank's sequences of the next step, int64 `[global_batch / ranks, seq]`."""
        mine = rank_samples(self._samples, global_batch=self._global_batch, rank=self._rank, ranks=self._ranks)
        self._samples += self._global_batch
        return _shifted(sequences(np.array(mine), seed=self._seed, seq_len=self._seq_len, vocab_size=self._vocab_size))

    def state(self) -> State:
        """Samples that all ranks together have taken; the same on every rank."""
        return {**self._facts, "samples": self._samples}

    def close(self) -> None:
        """Nothing is read ahead."""


class RandomRows:
    """Random rows that no stream gives; see `stream.Rows`."""

    def __init__(self, vocab_size: int, *, seq_len: int, sequences: int, rank: int, ranks: int) -> None:
        self._vocab_size, self._seq_len = vocab_size, seq_len
        self._sequences, self._rank, self._ranks = sequences, rank, ranks

    def __len__(self) -> int:
        return -(-self._sequences // self._ranks)

    def __iter__(self) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        for row in range(self._rank, len(self) * self._ranks, self._ranks):
            found = sequences(
                np.array([row]), seed=_VALIDATION_SEED, seq_len=self._seq_len, vocab_size=self._vocab_size
            )
            tokens, labels = _shifted(found)
            if row >= self._sequences:
                labels.fill(IGNORE)
            yield tokens[0], labels[0]


def _shifted(found: npt.NDArray[np.int64]) -> Batch:
    # Copies, also of a single row: whoever marks a label must not change a token.
    return Batch(found[:, :-1].copy(), found[:, 1:].copy())
