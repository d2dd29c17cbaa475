"""Random sequences: each token depends only on seed, sample number and position."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from titanlab.data.contract import IGNORE, Batch, State, check_state
from titanlab.data.indexed import keyed, mix, rank_samples

_STRIDE = np.uint64(0x9E3779B97F4A7C15)
_LOW = (1 << 32) - 1
# No training run has this seed: a config's seed is not negative.
_VALIDATION_SEED = -1


def sequences(
    numbers: npt.NDArray[np.int64], *, seed: int, seq_len: int, vocab_size: int, document_tokens: int | None = None
) -> npt.NDArray[np.int64]:
    """The sequences with the numbers `[k]`, each with the label of its last token: int64 `[k, seq + 1]`.

    With `document_tokens`, one in so many tokens is 0 and ends a document, and no other token is 0.
    """
    positions = np.arange(1, seq_len + 2, dtype=np.uint64) * _STRIDE
    bits = mix(keyed(seed, numbers)[:, None] + positions)
    # Scaling the upper 32 bits is uniform to one part in 2^32 / vocab_size, and cheaper than a remainder.
    tokens = ((bits >> np.uint64(32)) * np.uint64(vocab_size) >> np.uint64(32)).astype(np.int64)
    if document_tokens is None:
        return tokens
    # The lower 32 bits are independent of the upper ones.
    ends = (bits & np.uint64(_LOW)) * np.uint64(document_tokens) >> np.uint64(32) == 0
    return np.where(ends, 0, np.maximum(tokens, 1))


class RandomStream:
    """An endless stream of random sequences; see `contract.Stream`."""

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
        gaps: bool = False,
        document_tokens: int | None = None,
    ) -> None:
        self._identity = {"fingerprint": fingerprint, "seed": seed, "seq_len": seq_len}
        self._samples = 0
        if state is not None:
            check_state(state, **self._identity)
            self._samples = int(state["samples"])
        self._vocab_size, self._seed, self._seq_len = vocab_size, seed, seq_len
        self._global_batch, self._rank, self._ranks = global_batch, rank, ranks
        self._gaps, self._document_tokens = gaps, document_tokens

    def next_batch(self) -> Batch:
        """This rank's sequences of the next step, int64 `[global_batch / ranks, seq]`."""
        samples = rank_samples(self._samples, global_batch=self._global_batch, rank=self._rank, ranks=self._ranks)
        self._samples += self._global_batch
        batch = _shifted(
            sequences(
                np.array(samples),
                seed=self._seed,
                seq_len=self._seq_len,
                vocab_size=self._vocab_size,
                document_tokens=self._document_tokens,
            )
        )
        if self._gaps:
            for labels, sample in zip(batch.labels, samples, strict=True):
                labels[: self._seq_len * (sample % 4) // 4] = IGNORE
        return batch

    def state(self) -> State:
        """The number of samples that all ranks together have taken; the same on every rank."""
        return {**self._identity, "samples": self._samples}

    def close(self) -> None:
        """Nothing is read ahead."""


class RandomRows:
    """Random rows that differ from those of every stream; see `contract.Rows`."""

    def __init__(
        self,
        vocab_size: int,
        *,
        seq_len: int,
        sequences: int,
        rank: int,
        ranks: int,
        document_tokens: int | None = None,
    ) -> None:
        self._vocab_size, self._seq_len, self._document_tokens = vocab_size, seq_len, document_tokens
        self._sequences, self._rank, self._ranks = sequences, rank, ranks

    def __len__(self) -> int:
        return -(-self._sequences // self._ranks)

    def __iter__(self) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        for row in range(self._rank, len(self) * self._ranks, self._ranks):
            sequence = sequences(
                np.array([row]),
                seed=_VALIDATION_SEED,
                seq_len=self._seq_len,
                vocab_size=self._vocab_size,
                document_tokens=self._document_tokens,
            )
            tokens, labels = _shifted(sequence)
            if row >= self._sequences:
                labels.fill(IGNORE)
            yield tokens[0], labels[0]


def _shifted(rows: npt.NDArray[np.int64]) -> Batch:
    # Copies, also of a single row: setting a label to `IGNORE` must not change a token.
    return Batch(rows[:, :-1].copy(), rows[:, 1:].copy())
