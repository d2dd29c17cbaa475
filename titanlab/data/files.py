"""data=files: text, JSONL or parquet files, tokenised into the cache.

The functions are those that `titanlab.data.source` describes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from titanlab.data.corpus.text_files import Corpus, matching
from titanlab.data.files_schema import Files
from titanlab.data.prepared import Prepared
from titanlab.data.streams.stream import Rows, Stream
from titanlab.data.tokenizers import tokenizer as tokenizers
from titanlab.data.tokenizers.tokenizer import Tokenizer


def fingerprint(config: Files) -> str:
    return _prepared(config).fingerprint


def prepare(config: Files, *, report: Callable[[str], None]) -> None:
    _prepared(config).prepare(report)


def tokenizer(config: Files) -> Tokenizer:
    # A named one needs no corpus: text is sampled from a run on machines that no longer have it.
    return tokenizers.load(Path(config.tokenizer)) if config.tokenizer else _prepared(config).load_tokenizer()


def vocab_size(config: Files) -> int:
    return _prepared(config).index.vocab_size


def check(
    config: Files, *, seq_len: int, global_batch: int, ranks: int, vocab_size: int, validation_sequences: int
) -> None:
    _prepared(config).check(seq_len=seq_len, vocab_size=vocab_size, validation_sequences=validation_sequences)


def open_train(config: Files, **how: Any) -> Stream:
    return _prepared(config).open_train(**how)


def open_validation(config: Files, **how: Any) -> Rows:
    return _prepared(config).open_validation(**how)


def _prepared(config: Files) -> Prepared:
    return Prepared(
        name="files",
        corpus=Corpus(files=matching(config.files), text_field=config.text_field),
        tokenizer=config.tokenizer,
        vocab_size=config.vocab_size,
        validation_fraction=config.validation_fraction,
    )
