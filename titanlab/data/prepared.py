"""Text that becomes token shards in the cache: the code that data=stdlib and data=files share."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

from titanlab.data import cache, fingerprint
from titanlab.data.contract import DataSource
from titanlab.data.corpus.held_out import is_held_out
from titanlab.data.corpus.text_files import Corpus
from titanlab.data.documents import Separators, check_separators
from titanlab.data.rules import check_sequences, check_validation, check_vocab_size
from titanlab.data.shards.index import Index, is_whole, read_index
from titanlab.data.streams.stream import Report, Rows, State, Stream
from titanlab.data.text_schema import Text
from titanlab.data.tokenizers import tokenizer as tokenizers
from titanlab.data.tokenizers.tokenizer import Tokenizer
from titanlab.errors import ConfigError

ORDER = 1
"""Increased when a code change gives other tokens of the same corpus, or another order of them."""
VALIDATION_KEY = "data.validation_fraction"

_TRIED_CHARACTERS = 4096
TextConfig = TypeVar("TextConfig", bound=Text)


class PreparedText(DataSource, Generic[TextConfig]):
    """A corpus that becomes token shards in the cache."""

    def __init__(self, config: TextConfig) -> None:
        self.config = config

    @abstractmethod
    def find_corpus(self) -> Corpus:
        """The documents.

        Raises:
            ConfigError: there are none.
        """
        ...

    @cached_property
    def corpus(self) -> Corpus:
        """The documents."""
        return self.find_corpus()

    @cached_property
    def _fingerprint(self) -> str:
        """A hash of the texts, the tokenizer and the validation fraction; 32 hexadecimal digits."""
        config = self.config
        trained = ["trained", config.vocab_size]
        tokenizer = trained if config.tokenizer is None else tokenizers.load(Path(config.tokenizer)).fingerprint
        content = content_of(self.corpus)
        return fingerprint.of_values(ORDER, content, self.corpus.text_field, tokenizer, config.validation_fraction)

    def fingerprint(self) -> str:
        return self._fingerprint

    @property
    def folder(self) -> Path:
        """The folder of the token shards; it may not exist yet."""
        return cache.root() / "tokens" / f"{self.config.kind}-{self.fingerprint()}"

    @cached_property
    def index(self) -> Index:
        """The index of the token shards.

        Raises:
            ConfigError: the shards have not been made.
        """
        folder = self.folder
        if not folder.is_dir():
            raise ConfigError("data", self.config.kind, f"{folder} is missing", "prepare the data first")
        return read_index(folder, "data")

    def prepare(self, *, report: Report) -> None:
        """Make the token shards, unless they exist."""
        cache.build(self.folder, lambda folder: self._make(folder, report), report=report, is_whole=is_whole)

    def tokenizer(self) -> Tokenizer:
        # A tokenizer that the config names needs no corpus: text may be generated on a machine without the corpus.
        if self.config.tokenizer is not None:
            return tokenizers.load(Path(self.config.tokenizer))
        index = self.index
        return tokenizers.load(self.folder / str(index.tokenizer))

    def vocab_size(self) -> int:
        return self.index.vocab_size

    def separators(self) -> Separators:
        return Separators(begin=self.index.bos_id, end=self.index.eos_id)

    def check(self, *, seq_len: int, vocab_size: int, validation_sequences: int, **_: int) -> None:
        config, folder = self.config, self.folder
        whole = folder.is_dir() and is_whole(folder)
        if not whole:
            # Before the vocabulary: a file without text must give its own error.
            self.corpus.check()
        check_vocab_size(vocab_size, config.vocab_size if config.tokenizer is None else self.tokenizer().vocab_size)
        if config.document_mask and config.tokenizer is not None:
            check_tokenizer(self.tokenizer())
        if validation_sequences and not config.validation_fraction:
            check_validation(None, VALIDATION_KEY, config.validation_fraction)
        if whole:
            index = self.index
            check_sequences(index, seq_len)
            if validation_sequences:
                check_validation(index, VALIDATION_KEY, config.validation_fraction)

    def open_train(self, *, state: State | None, **how: Any) -> Stream:
        # Imported here: it needs numpy, and the checks do not.
        from titanlab.data.streams import indexed

        return indexed.open_train(self.folder, self.index, fingerprint=self.fingerprint(), state=state, **how)

    def open_validation(self, **how: int) -> Rows:
        from titanlab.data.streams import indexed

        rows: dict[str, Any] = {"key": VALIDATION_KEY, "value": self.config.validation_fraction, **how}
        return indexed.open_validation(self.folder, self.index, **rows)

    def _make(self, folder: Path, report: Report) -> None:
        make_shards(
            folder,
            self.corpus,
            tokenizer=self.config.tokenizer,
            vocab_size=self.config.vocab_size,
            validation_fraction=self.config.validation_fraction,
            fingerprint=self.fingerprint(),
            report=report,
        )


def content_of(corpus: Corpus) -> str:
    """A hash of a corpus's files; 32 hexadecimal digits.

    Raises:
        ConfigError: a file cannot be read.
    """
    try:
        return fingerprint.of_files(corpus.files)
    except OSError as error:
        rule = f"cannot be read ({error.strerror})"
        raise ConfigError(corpus.key, error.filename or "", rule, "check its permissions") from error


def check_tokenizer(tokenizer: Tokenizer) -> None:
    """Check that a tokenizer tells documents apart; one that is trained here does.

    Raises:
        ConfigError: it does not.
    """
    check_separators(
        tokenizers.separators_of(tokenizer), whose="the tokenizer", cure="try false, or a tokenizer with such a token"
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
    """Fill an empty folder with the token shards of a corpus; without `tokenizer`, train one first.

    Raises:
        ConfigError: the corpus or the tokenizer cannot be used.
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
    report(f"reading {len(corpus.files):,} files, {size / 1e6:,.1f} MB: {corpus.in_words()}")
    # Imported here: they need numpy or sentencepiece, and the checks do not.
    from titanlab.data.shards import writer
    from titanlab.data.tokenizers import training

    if tokenizer is None:
        tokenizer_file = folder / "tokenizer.model"
        sample = corpus.sample(training.SAMPLE_CHARACTERS)
        train_tokenizer(sample, vocab_size=vocab_size, file=tokenizer_file, report=report)
    else:
        tokenizer_file = tokenizers.find(Path(tokenizer))
    started = time.monotonic()
    report("tokenising")
    index = writer.write_documents(
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
    """Train a tokenizer and report it.

    Raises:
        ConfigError: the texts are too few for the vocabulary.
    """
    from titanlab.data.tokenizers import training

    started = time.monotonic()
    report(f"training a tokenizer of {vocab_size:,} pieces")
    training.train(texts, vocab_size=vocab_size, file=file)
    report(f"trained it in {time.monotonic() - started:.1f} s")
