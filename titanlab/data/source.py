"""The functions that other packages call for any kind of data, and the checks that several kinds of data share.

The methods of `titanlab.data.contract.DataSource` with the same names document these functions.
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

__all__ = ["IGNORE", "Batch", "Rows", "Separators", "State", "Stream", "Tokenizer", "merge_states"]


def fingerprint(config: DataConfig) -> str:
    return config.implementation().fingerprint()


def check(config: DataConfig, *, global_batch: int, ranks: int, validation_sequences: int = 0, **sizes: int) -> None:
    check_multiple("training.global_batch", global_batch, ranks)
    implementation = config.implementation()
    if config.document_mask and not implementation.has_documents:
        raise _without_documents(config)
    implementation.check(global_batch=global_batch, ranks=ranks, validation_sequences=validation_sequences, **sizes)


def prepare(config: DataConfig, *, report: Report) -> None:
    config.implementation().prepare(report=report)


def tokenizer(config: DataConfig) -> Tokenizer | None:
    return config.implementation().tokenizer()


def separators(config: DataConfig) -> Separators:
    """The tokens that separate the documents of prepared data."""
    tokens = config.implementation().separators()
    if tokens is None:
        raise _without_documents(config)
    return tokens


def _without_documents(config: DataConfig) -> ConfigError:
    return ConfigError(DOCUMENT_MASK, True, f"data={config.kind} does not say where documents begin", "try false")


def open_train(config: DataConfig, *, global_batch: int, ranks: int, state: State | None = None, **how: int) -> Stream:
    check_multiple("training.global_batch", global_batch, ranks)
    return config.implementation().open_train(global_batch=global_batch, ranks=ranks, state=state, **how)


def open_validation(config: DataConfig, **how: int) -> Rows:
    return config.implementation().open_validation(**how)


def check_vocab_size(of_model: int, of_data: int) -> None:
    """Check that the model's embedding has a row for every token."""
    if of_model < of_data:
        rule = f"is smaller than the {of_data} tokens of the data's vocabulary"
        raise ConfigError("model.vocab_size", of_model, rule, f"try model.vocab_size={of_data}")


def check_sequences(index: ShardIndex, seq_len: int) -> None:
    """Check that there is at least one sequence to train on: a file of `seq_len` + 1 tokens."""
    if index.sequences("train", seq_len) < 1:
        longest = max((shard.tokens for shard in index.train), default=0)
        rule = f"the corpus is shorter than one sequence: it has {index.tokens('train')} tokens to train on"
        cure = f"try {longest - 1} or less, or give more text" if longest > 1 else "give more text"
        raise ConfigError("training.seq_len", seq_len, rule, cure)


def check_validation(index: ShardIndex | None, key: str, value: object) -> None:
    """Check that there are held-out tokens to validate on; `index` is None if the config holds out none."""
    if index is None or index.tokens("validation") < 2:
        raise ConfigError(key, value, "holds nothing out to validate on", "hold some out, or training.validate_every=0")


def check_multiple(key: str, value: int, ranks: int) -> None:
    """Check that `ranks` divides `value`: data-parallel ranks need equally many sequences of a step, or streams."""
    if value % ranks:
        below, above = value // ranks * ranks, (value // ranks + 1) * ranks
        cure = f"try {below} or {above}" if below else f"try {above}"
        raise ConfigError(key, value, f"must be a multiple of the {ranks} data-parallel processes", cure)
