"""The one door to data: what the recipe, the trainer and the sampler call, for every kind of data.

Each function finds the module of the config's kind (`stdlib_schema` → `stdlib`) and calls the function of
the same name there, so a kind that another package brings needs no change here. A kind's module has all
functions below but `merge_states`; `check` may be missing. Nothing here imports torch, nor, until data is
opened, numpy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from titanlab.data.rules import hold_batch
from titanlab.data.streams.stream import IGNORE, Batch, Rows, State, Stream, merge_states
from titanlab.data.tokenizers.tokenizer import Tokenizer
from titanlab.options import implementation

__all__ = [
    "IGNORE",
    "Batch",
    "Rows",
    "State",
    "Stream",
    "Tokenizer",
    "check",
    "fingerprint",
    "merge_states",
    "open_train",
    "open_validation",
    "prepare",
    "tokenizer",
    "vocab_size",
]


def fingerprint(config: Any) -> str:
    """A short hash of the data's content and order, part of a run's identity; the same before and after `prepare`.

    Raises:
        ConfigError: files that the config names are missing or cannot be read.
    """
    return str(implementation(config).fingerprint(config))


def check(
    config: Any, *, seq_len: int, global_batch: int, ranks: int, vocab_size: int, validation_sequences: int = 0
) -> None:
    """Hold a config to every rule that can be checked at this time; call it again after `prepare` for the rest.

    Args:
        config: of the data.
        seq_len: tokens in a sequence.
        global_batch: sequences in a step, over all ranks.
        ranks: data-parallel ranks.
        vocab_size: the model's.
        validation_sequences: of a validation; 0 where there is none.

    Raises:
        ConfigError: a rule is broken, or files that the config names are missing or cannot be read.
    """
    hold_batch(global_batch, ranks)
    rules = getattr(implementation(config), "check", None)
    if rules is not None:
        rules(
            config,
            seq_len=seq_len,
            global_batch=global_batch,
            ranks=ranks,
            vocab_size=vocab_size,
            validation_sequences=validation_sequences,
        )


def prepare(config: Any, *, report: Callable[[str], None]) -> None:
    """Do what must be done once: train a tokenizer, tokenise into the cache. At once where it has been done.

    Safe when several processes call it together: one works, the others wait.

    Args:
        config: of the data.
        report: given a line now and then.

    Raises:
        ConfigError: the data, the tokenizer or the cache cannot be used.
    """
    implementation(config).prepare(config, report=report)


def tokenizer(config: Any) -> Tokenizer | None:
    """The tokenizer of prepared data; None where tokens have no text.

    Raises:
        ConfigError: it cannot be read, or the data has not been prepared.
    """
    found: Tokenizer | None = implementation(config).tokenizer(config)
    return found


def vocab_size(config: Any) -> int:
    """Tokens that prepared data can have: every id is below it.

    Raises:
        ConfigError: the data has not been prepared.
    """
    return int(implementation(config).vocab_size(config))


def open_train(
    config: Any, *, seed: int, seq_len: int, global_batch: int, rank: int, ranks: int, state: State | None = None
) -> Stream:
    """One rank's part of the endless stream of training sequences.

    The global order is a function of data, seed, sequence length and sample number. Sample g belongs to rank
    g % ranks, so that it is the same for any number of ranks.

    Args:
        config: of prepared data.
        seed: of the order.
        seq_len: tokens in a sequence.
        global_batch: sequences in a step, over all ranks; a multiple of `ranks`.
        rank: data-parallel rank.
        ranks: how many there are.
        state: resume here: the merged states of all ranks, however many there were.

    Raises:
        ConfigError: the data has not been prepared, is too short, or `state` is of other data; or `ranks` does
            not divide `global_batch`.
    """
    hold_batch(global_batch, ranks)
    stream: Stream = implementation(config).open_train(
        config, seed=seed, seq_len=seq_len, global_batch=global_batch, rank=rank, ranks=ranks, state=state
    )
    return stream


def open_validation(config: Any, *, seq_len: int, sequences: int, rank: int, ranks: int) -> Rows:
    """One rank's part of the held-out sequences: the same at every call and in every pass.

    Every rank has equally many rows. Over all ranks they are `sequences`, or all there are if there are
    fewer; padding, within a row or of whole rows, has the label `IGNORE`.

    Args:
        config: of prepared data.
        seq_len: tokens in a sequence.
        sequences: rows over all ranks.
        rank: data-parallel rank.
        ranks: how many there are.

    Raises:
        ConfigError: the data has not been prepared, or nothing was held out.
    """
    rows: Rows = implementation(config).open_validation(
        config, seq_len=seq_len, sequences=sequences, rank=rank, ranks=ranks
    )
    return rows
