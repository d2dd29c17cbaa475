"""The functions that other folders call for every kind of data; see `titanlab.data.contract`.

This module does not import torch; it imports numpy only when data is opened.
"""

from __future__ import annotations

from titanlab.data.contract import DataConfig
from titanlab.data.documents import KEY, Separators
from titanlab.data.rules import check_batch
from titanlab.data.streams.stream import IGNORE, Batch, Report, Rows, State, Stream, merge_states
from titanlab.data.tokenizers.tokenizer import Tokenizer
from titanlab.errors import ConfigError

__all__ = [
    "IGNORE",
    "Batch",
    "Rows",
    "Separators",
    "State",
    "Stream",
    "Tokenizer",
    "check",
    "fingerprint",
    "merge_states",
    "open_train",
    "open_validation",
    "prepare",
    "separators",
    "tokenizer",
    "vocab_size",
]


def fingerprint(config: DataConfig) -> str:
    """A short hash of the data's content and order."""
    return config.implementation().fingerprint()


def check(
    config: DataConfig, *, seq_len: int, global_batch: int, ranks: int, vocab_size: int, validation_sequences: int = 0
) -> None:
    """Check every rule that can be checked now; call it again after `prepare` for the rest."""
    check_batch(global_batch, ranks)
    implementation = config.implementation()
    if config.document_mask and not implementation.has_documents:
        raise _without_documents(config)
    implementation.check(
        seq_len=seq_len,
        global_batch=global_batch,
        ranks=ranks,
        vocab_size=vocab_size,
        validation_sequences=validation_sequences,
    )


def prepare(config: DataConfig, *, report: Report) -> None:
    """Do the work that is needed once; any number of processes may call this together."""
    config.implementation().prepare(report=report)


def tokenizer(config: DataConfig) -> Tokenizer | None:
    """The tokenizer of prepared data; None if the tokens do not come from text."""
    return config.implementation().tokenizer()


def vocab_size(config: DataConfig) -> int:
    """Size of the vocabulary of prepared data: every id is below it."""
    return config.implementation().vocab_size()


def separators(config: DataConfig) -> Separators:
    """The tokens that separate the documents of prepared data.

    Raises:
        ConfigError: the kind of data has no documents, or the data has not been prepared.
    """
    tokens = config.implementation().separators()
    if tokens is None:
        raise _without_documents(config)
    return tokens


def _without_documents(config: DataConfig) -> ConfigError:
    return ConfigError(KEY, True, f"data={config.kind} does not say where documents begin", "try false")


def open_train(
    config: DataConfig,
    *,
    seed: int,
    seq_len: int,
    global_batch: int,
    rank: int,
    ranks: int,
    state: State | None = None,
) -> Stream:
    """One rank's part of the endless stream of training sequences.

    Raises:
        ConfigError: `ranks` does not divide `global_batch`, or the data cannot be opened.
    """
    check_batch(global_batch, ranks)
    return config.implementation().open_train(
        seed=seed, seq_len=seq_len, global_batch=global_batch, rank=rank, ranks=ranks, state=state
    )


def open_validation(config: DataConfig, *, seq_len: int, sequences: int, rank: int, ranks: int) -> Rows:
    """One rank's part of the held-out sequences: the same at every call and in every pass."""
    return config.implementation().open_validation(seq_len=seq_len, sequences=sequences, rank=rank, ranks=ranks)
