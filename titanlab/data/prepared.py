"""Text that becomes token shards in the cache: what data=stdlib and data=files share."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from titanlab.data import cache, fingerprint
from titanlab.data.corpus.held_out import is_held_out
from titanlab.data.corpus.text_files import Corpus
from titanlab.data.rules import hold_sequences, hold_validation, hold_vocabulary
from titanlab.data.shards.index import Index, is_whole, read_index
from titanlab.data.streams.stream import Report, Rows, State, Stream
from titanlab.data.tokenizers import tokenizer as tokenizers
from titanlab.data.tokenizers.tokenizer import Tokenizer
from titanlab.errors import ConfigError

ORDER = 1
"""Raised when the same corpus would give other tokens, or the same tokens in another order."""
VALIDATION_KEY = "data.validation_fraction"

_TRIED_CHARACTERS = 4096


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A corpus and how it becomes tokens; see `text_schema.Text` for the last three.

    Attributes:
        name: of the kind of data, for messages and the cache.
        corpus: the documents.
    """

    name: str
    corpus: Corpus
    tokenizer: str | None
    vocab_size: int
    validation_fraction: float

    @cached_property
    def fingerprint(self) -> str:
        """32 hexadecimal digits of the texts, the tokenizer and what is held out.

        Raises:
            ConfigError: a file cannot be read.
        """
        trained = ["trained", self.vocab_size]
        named = trained if self.tokenizer is None else tokenizers.load(Path(self.tokenizer)).fingerprint
        try:
            content = fingerprint.of_files(self.corpus.files)
        except OSError as error:
            raise ConfigError(
                self.corpus.key, error.filename or "", f"cannot be read ({error.strerror})", "check its permissions"
            ) from error
        return fingerprint.of_values(ORDER, content, self.corpus.text_field, named, self.validation_fraction)

    @property
    def folder(self) -> Path:
        """Where its token shards are, or will be."""
        return cache.root() / "tokens" / f"{self.name}-{self.fingerprint}"

    @cached_property
    def index(self) -> Index:
        """The index of its token shards.

        Raises:
            ConfigError: they have not been made.
        """
        folder = self.folder
        if not folder.is_dir():
            raise ConfigError("data", self.name, f"{folder} is missing", "prepare the data first")
        return read_index(folder, "data")

    def prepare(self, report: Report) -> None:
        """Make the token shards, unless they are there."""
        cache.build(self.folder, lambda folder: self._make(folder, report), report=report, is_whole=is_whole)

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer of its token shards; before they are made, the one that the config names."""
        if self.tokenizer is not None:
            return tokenizers.load(Path(self.tokenizer))
        index = self.index
        return tokenizers.load(self.folder / str(index.tokenizer))

    def check(self, *, seq_len: int, vocab_size: int, validation_sequences: int) -> None:
        """Every rule that can be checked now; more of them after `prepare`.

        Raises:
            ConfigError: one is broken.
        """
        folder = self.folder
        whole = folder.is_dir() and is_whole(folder)
        if not whole:
            # Before the vocabulary: of a file that has no text, that says nothing.
            self.corpus.check()
        expected = self.vocab_size if self.tokenizer is None else self.load_tokenizer().vocab_size
        hold_vocabulary(vocab_size, expected)
        if validation_sequences and not self.validation_fraction:
            hold_validation(None, VALIDATION_KEY, self.validation_fraction)
        if whole:
            index = self.index
            hold_sequences(index, seq_len)
            if validation_sequences:
                hold_validation(index, VALIDATION_KEY, self.validation_fraction)

    def open_train(self, *, state: State | None, **how: Any) -> Stream:
        """The training stream; see `source.open_train`."""
        # Not at the top: it needs numpy, which the rules do not.
        indexed: Any = importlib.import_module("titanlab.data.streams.indexed")
        stream: Stream = indexed.open_train(self.folder, self.index, fingerprint=self.fingerprint, state=state, **how)
        return stream

    def open_validation(self, **how: int) -> Rows:
        """The held-out rows; see `source.open_validation`."""
        indexed: Any = importlib.import_module("titanlab.data.streams.indexed")
        asked: dict[str, Any] = {"key": VALIDATION_KEY, "value": self.validation_fraction, **how}
        rows: Rows = indexed.open_validation(self.folder, self.index, **asked)
        return rows

    def _make(self, folder: Path, report: Report) -> None:
        make_shards(
            folder,
            self.corpus,
            tokenizer=self.tokenizer,
            vocab_size=self.vocab_size,
            validation_fraction=self.validation_fraction,
            fingerprint=self.fingerprint,
            report=report,
        )


def make_shards(
    folder: Path,
    corpus: Corpus,
    *,
    tokenizer: str | None,
    vocab_size: int,
    validation_fraction: float,
    fingerprint: str,
    report: Report,
) -> Index:
    """Fill an empty folder with the token shards of a corpus, and train their tokenizer if none is named.

    Raises:
        ConfigError: the corpus or the tokenizer is at fault.
    """
    size = sum(file.stat().st_size for file in corpus.files)
    first = next(corpus.documents(), None)
    if first is None:
        raise ConfigError(corpus.key, corpus.files[0], "has no text in it", "give files with text in them")
    if tokenizer is not None:
        reader = tokenizers.load(Path(tokenizer))
        if not reader.encode(first[:_TRIED_CHARACTERS]):
            rule = f"makes no token of the text of {corpus.files[0].name}: it has {reader.vocab_size} tokens"
            raise ConfigError("data.tokenizer", tokenizer, rule, "give a tokenizer that was trained on such text")
    report(f"reading {len(corpus.files):,} files, {size / 1e6:,.1f} MB")
    training: Any = importlib.import_module("titanlab.data.tokenizers.training")
    writer: Any = importlib.import_module("titanlab.data.shards.writer")
    if tokenizer is None:
        tokenizer_file = folder / "tokenizer.model"
        sample = corpus.sample(training.SAMPLE_CHARACTERS)
        train_tokenizer(sample, vocab_size=vocab_size, file=tokenizer_file, report=report)
    else:
        tokenizer_file = tokenizers.find(Path(tokenizer))
    started = time.monotonic()
    report("tokenising")
    index: Index = writer.write_documents(
        folder,
        corpus.documents(),
        tokenizer=tokenizers.load(tokenizer_file),
        tokenizer_file=tokenizer_file,
        fingerprint=fingerprint,
        report=report,
        held_out=lambda text: is_held_out(text, validation_fraction),
        tail_fraction=validation_fraction,
    )
    report(
        f"{index.tokens('train'):,} tokens to train on and {index.tokens('validation'):,} held out "
        f"after {time.monotonic() - started:.1f} s"
    )
    return index


def train_tokenizer(texts: Iterable[str], *, vocab_size: int, file: Path, report: Report) -> None:
    """Train a tokenizer and say so.

    Raises:
        ConfigError: the texts do not suffice for the vocabulary.
    """
    training: Any = importlib.import_module("titanlab.data.tokenizers.training")
    started = time.monotonic()
    report(f"training a tokenizer of {vocab_size:,} pieces")
    training.train(texts, vocab_size=vocab_size, file=file)
    report(f"trained it in {time.monotonic() - started:.1f} s")
