"""The functions that other folders call for every kind of data, and the rules that kinds of data share.

This module does not import torch; it imports numpy only when data is opened. See `titanlab.data.contract`.
"""

from __future__ import annotations

from titanlab.data.contract import (
    DOCUMENT_MASK,
    IGNORE,
    Batch,
    DataConfig,
    Report,
    Rows,
    Separators,
    State,
    Stream,
    merge_states,
)
from titanlab.data.shards import ShardIndex
from titanlab.data.tokenizers import Tokenizer
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
    check_multiple("training.global_batch", global_batch, ranks)
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
    return ConfigError(DOCUMENT_MASK, True, f"data={config.kind} does not say where documents begin", "try false")


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
    check_multiple("training.global_batch", global_batch, ranks)
    return config.implementation().open_train(
        seed=seed, seq_len=seq_len, global_batch=global_batch, rank=rank, ranks=ranks, state=state
    )


def open_validation(config: DataConfig, *, seq_len: int, sequences: int, rank: int, ranks: int) -> Rows:
    """One rank's part of the held-out sequences: the same at every call and in every pass."""
    return config.implementation().open_validation(seq_len=seq_len, sequences=sequences, rank=rank, ranks=ranks)


def check_vocab_size(of_model: int, of_data: int) -> None:
    """Check that the model's embedding has a row for every token.

    Raises:
        ConfigError: the model's vocabulary is smaller than the data's.
    """
    if of_model < of_data:
        raise ConfigError(
            "model.vocab_size",
            of_model,
            f"is smaller than the {of_data} tokens of the data's vocabulary",
            f"try model.vocab_size={of_data}",
        )


def check_sequences(index: ShardIndex, seq_len: int) -> None:
    """Check that there is at least one sequence to train on.

    Raises:
        ConfigError: no file has `seq_len` + 1 tokens.
    """
    if index.sequences("train", seq_len) < 1:
        longest = max((shard.tokens for shard in index.train), default=0)
        raise ConfigError(
            "training.seq_len",
            seq_len,
            f"the corpus is shorter than one sequence: it has {index.tokens('train')} tokens to train on",
            f"try {longest - 1} or less, or give more text" if longest > 1 else "give more text",
        )


def check_validation(index: ShardIndex | None, key: str, value: object) -> None:
    """Check that there are held-out tokens to validate on; `index` is None if the config excludes them.

    Raises:
        ConfigError: there are no held-out tokens.
    """
    if index is None or index.tokens("validation") < 2:
        raise ConfigError(key, value, "holds nothing out to validate on", "hold some out, or training.validate_every=0")


def check_multiple(key: str, value: int, ranks: int) -> None:
    """Check that every data-parallel rank has as many sequences of a step, or virtual streams, as the others.

    Raises:
        ConfigError: `value` is no multiple of `ranks`.
    """
    if value % ranks:
        rule = f"must be a multiple of the {ranks} data-parallel processes"
        raise ConfigError(key, value, rule, f"try {multiples_around(value, ranks)}")


def multiples_around(value: int, step: int) -> str:
    """The nearest multiples of `step`, for a message: `8 or 12`."""
    below, above = value // step * step, (value // step + 1) * step
    return f"{below} or {above}" if below else str(above)
