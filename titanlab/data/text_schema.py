"""Config that all kinds of text data share: the tokenizer and the validation split."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from titanlab.data.contract import DataConfig
from titanlab.errors import ConfigError

SMALLEST_VOCABULARY = 320
"""256 bytes, three special tokens and room for the characters of a plain text."""


@dataclass(kw_only=True)
class Text(DataConfig):
    """Text that becomes tokens.

    Attributes:
        tokenizer: a SentencePiece `.model`, an HF `tokenizer.json`, or a folder with one of them; null: train
            a SentencePiece BPE on the text itself.
        vocab_size: of the tokenizer to train; not used if `tokenizer` names one.
        validation_fraction: fraction of the documents to hold out of training, chosen by a hash of their content.
        document_mask: attention stays within each document, and positions restart at its first token; what a sequence
            cuts off a document is a document of its own.
    """

    # The tokenizer's path is not part of the run's identity: the data's fingerprint has the file's content.
    tokenizer: str | None = field(default=None, metadata={"identity": False})
    # Small, so that the embedding of a small model does not outweigh its blocks.
    vocab_size: int = 2048
    validation_fraction: float = 0.01
    document_mask: bool = field(default=False, metadata={"before": False})

    def __post_init__(self) -> None:
        if self.vocab_size < SMALLEST_VOCABULARY:
            raise ConfigError(
                "data.vocab_size",
                self.vocab_size,
                f"must be at least {SMALLEST_VOCABULARY}: all bytes, special tokens and some characters",
                "try 2048",
            )
        if not 0 <= self.validation_fraction <= 0.5:
            raise ConfigError(
                "data.validation_fraction",
                self.validation_fraction,
                "must be between 0 and 0.5",
                "try 0.01, or 0 to hold nothing out",
            )
        if self.tokenizer is not None:
            self.tokenizer = absolute(self.tokenizer)


def absolute(path: str) -> str:
    """The path made absolute: a run may be resumed from another working directory."""
    return os.path.abspath(os.path.expanduser(path))
