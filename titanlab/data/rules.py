"""Rules between data, model, batch and layout that several kinds of data share."""

from __future__ import annotations

from titanlab.data.shards.index import Index
from titanlab.errors import ConfigError


def check_batch(global_batch: int, ranks: int) -> None:
    """Check that every data-parallel rank has the same number of sequences in a step.

    Raises:
        ConfigError: `global_batch` is no multiple of `ranks`.
    """
    if global_batch % ranks:
        raise ConfigError(
            "training.global_batch",
            global_batch,
            f"must be a multiple of the {ranks} data-parallel processes",
            f"try {multiples_around(global_batch, ranks)}",
        )


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


def check_sequences(index: Index, seq_len: int) -> None:
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


def check_validation(index: Index | None, key: str, value: object) -> None:
    """Check that there are held-out tokens to validate on; `index` is None if the config excludes them.

    Raises:
        ConfigError: there are no held-out tokens.
    """
    if index is None or index.tokens("validation") < 2:
        raise ConfigError(key, value, "holds nothing out to validate on", "hold some out, or training.validate_every=0")


def check_streams(streams: int, ranks: int) -> None:
    """Check that every data-parallel rank owns the same number of virtual streams.

    Raises:
        ConfigError: `streams` is no multiple of `ranks`.
    """
    if streams % ranks:
        raise ConfigError(
            "data.streams",
            streams,
            f"must be a multiple of the {ranks} data-parallel processes",
            f"try {multiples_around(streams, ranks)}",
        )


def multiples_around(value: int, step: int) -> str:
    """The nearest multiples of `step`, for a message: `8 or 12`."""
    below, above = value // step * step, (value // step + 1) * step
    return f"{below} or {above}" if below else str(above)
