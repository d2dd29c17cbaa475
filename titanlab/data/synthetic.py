"""data=synthetic: random tokens. Each token depends only on seed, sample number and position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from titanlab.data.contract import IGNORE, Batch, DataSource, Report, Rows, Separators, Stream
from titanlab.data.schema import Synthetic
from titanlab.data.source import check_vocab_size

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

END = 0
"""The token that ends a document."""
_STRIDE = 0x9E3779B97F4A7C15
_LOW = (1 << 32) - 1
# No training run has this seed, because a config's seed is not negative.
_VALIDATION_SEED = -1


@dataclass(frozen=True)
class SyntheticSource(DataSource):
    """Random tokens."""

    config: Synthetic

    def fingerprint(self) -> str:
        documents = f"-documents-{self.config.document_tokens}" if self.config.document_mask else ""
        return f"synthetic-1-{self.config.vocab_size}" + ("-gaps" if self.config.gaps else "") + documents

    def prepare(self, *, report: Report) -> None:
        """There is nothing to do."""

    def tokenizer(self) -> None:
        return None

    def separators(self) -> Separators:
        return Separators(end=END)

    def check(self, *, vocab_size: int, **_: int) -> None:
        check_vocab_size(vocab_size, self.config.vocab_size)

    def open_train(self, *, seed: int, seq_len: int, **place: Any) -> Stream:
        # Imported here: the checks of a recipe need no numpy.
        from titanlab.data.indexed import NumberedStream

        def read(samples: npt.NDArray[np.int64]) -> Batch:
            batch = _shifted(random_sequences(samples, seed=seed, seq_len=seq_len, **self._tokens))
            if self.config.gaps:
                for labels, sample in zip(batch.labels, samples.tolist(), strict=True):
                    labels[: seq_len * (sample % 4) // 4] = IGNORE
            return batch

        identity = {"fingerprint": self.fingerprint(), "seed": seed, "seq_len": seq_len}
        return NumberedStream(lambda samples: samples, read, identity=identity, **place)

    def open_validation(self, *, seq_len: int, sequences: int, **how: int) -> Rows:
        import numpy as np

        from titanlab.data.indexed import HeldOutRows

        def read(row: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
            tokens, labels = _shifted(
                random_sequences(np.array([row]), seed=_VALIDATION_SEED, seq_len=seq_len, **self._tokens)
            )
            return tokens[0], labels[0]

        return HeldOutRows(read, sequences, seq_len=seq_len, sequences=sequences, **how)

    @property
    def _tokens(self) -> dict[str, Any]:
        documents = self.config.document_tokens if self.config.document_mask else None
        return {"vocab_size": self.config.vocab_size, "document_tokens": documents}


def random_sequences(
    numbers: npt.NDArray[np.int64], *, seed: int, seq_len: int, vocab_size: int, document_tokens: int | None = None
) -> npt.NDArray[np.int64]:
    """The sequences with the numbers `[k]`; each ends with the label of its last token: int64 `[k, seq + 1]`.

    With `document_tokens`, token 0 ends each document: on average one of `document_tokens` tokens is 0.
    """
    # Imported here: the checks of a recipe need no numpy.
    import numpy as np

    from titanlab.data.indexed import keyed, mix

    positions = np.arange(1, seq_len + 2, dtype=np.uint64) * np.uint64(_STRIDE)
    bits = mix(keyed(seed, numbers)[:, None] + positions)
    # Scale the upper 32 bits: cheaper than a remainder, and the tokens are uniform to one part in 2^32 / vocab_size.
    tokens = ((bits >> np.uint64(32)) * np.uint64(vocab_size) >> np.uint64(32)).astype(np.int64)
    if document_tokens is None:
        return tokens
    # The lower 32 bits decide where documents end: they are independent of the upper bits.
    ends = (bits & np.uint64(_LOW)) * np.uint64(document_tokens) >> np.uint64(32) == 0
    return np.where(ends, 0, np.maximum(tokens, 1))


def _shifted(rows: npt.NDArray[np.int64]) -> Batch:
    # Copy, also a single row: setting a label to `IGNORE` must not change a token.
    return Batch(rows[:, :-1].copy(), rows[:, 1:].copy())
