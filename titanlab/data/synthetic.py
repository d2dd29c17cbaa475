"""data=synthetic: random tokens, computed from seed, sample and position.

The functions are those that `titanlab.data.source` describes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from titanlab.data.rules import hold_vocabulary
from titanlab.data.streams.stream import Rows, State, Stream
from titanlab.data.synthetic_schema import Synthetic


def fingerprint(config: Synthetic) -> str:
    return f"synthetic-1-{config.vocab_size}"


def prepare(config: Synthetic, *, report: Callable[[str], None]) -> None:
    """Nothing is to be done."""


def tokenizer(config: Synthetic) -> None:
    return None


def vocab_size(config: Synthetic) -> int:
    return config.vocab_size


def check(
    config: Synthetic, *, seq_len: int, global_batch: int, ranks: int, vocab_size: int, validation_sequences: int
) -> None:
    hold_vocabulary(vocab_size, config.vocab_size)


def open_train(config: Synthetic, *, state: State | None = None, **how: Any) -> Stream:
    random: Any = importlib.import_module("titanlab.data.streams.random_tokens")
    stream: Stream = random.RandomStream(config.vocab_size, fingerprint=fingerprint(config), state=state, **how)
    return stream


def open_validation(config: Synthetic, **how: int) -> Rows:
    random: Any = importlib.import_module("titanlab.data.streams.random_tokens")
    rows: Rows = random.RandomRows(config.vocab_size, **how)
    return rows
