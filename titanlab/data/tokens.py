"""data=tokens: token shards that were made before.

The functions are those that `titanlab.data.source` describes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from titanlab.data.rules import hold_sequences, hold_validation, hold_vocabulary
from titanlab.data.shards.index import Index, fingerprint_of, read_index
from titanlab.data.streams.stream import Rows, State, Stream
from titanlab.data.tokenizers import tokenizer as tokenizers
from titanlab.data.tokenizers.tokenizer import Tokenizer
from titanlab.data.tokens_schema import TokenFolder


def fingerprint(config: TokenFolder) -> str:
    return fingerprint_of(Path(config.folder), _index(config))


def prepare(config: TokenFolder, *, report: Callable[[str], None]) -> None:
    # Nothing to make; what a wrong index would do to a run on a GPU is worth a look at the tokens, though.
    shards: Any = importlib.import_module("titanlab.data.shards.split")
    shards.hold_tokens(Path(config.folder), _index(config))


def tokenizer(config: TokenFolder) -> Tokenizer | None:
    name = _index(config).tokenizer
    return None if name is None else tokenizers.load(Path(config.folder, name), "data.folder")


def vocab_size(config: TokenFolder) -> int:
    return _index(config).vocab_size


def check(
    config: TokenFolder, *, seq_len: int, global_batch: int, ranks: int, vocab_size: int, validation_sequences: int
) -> None:
    index = _index(config)
    hold_vocabulary(vocab_size, index.vocab_size)
    hold_sequences(index, seq_len)
    if validation_sequences:
        hold_validation(index, "data.folder", config.folder)


def open_train(config: TokenFolder, *, state: State | None = None, **how: Any) -> Stream:
    indexed: Any = importlib.import_module("titanlab.data.streams.indexed")
    stream: Stream = indexed.open_train(
        Path(config.folder), _index(config), fingerprint=fingerprint(config), state=state, **how
    )
    return stream


def open_validation(config: TokenFolder, **how: int) -> Rows:
    indexed: Any = importlib.import_module("titanlab.data.streams.indexed")
    rows: Rows = indexed.open_validation(
        Path(config.folder), _index(config), key="data.folder", value=config.folder, **how
    )
    return rows


def _index(config: TokenFolder) -> Index:
    return read_index(Path(config.folder))
