"""Data in token shards: makes shards from text, in the cache or for `titanlab tokenize`, and opens existing shards."""

from __future__ import annotations

import errno
import functools
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Generic, TypeVar

from titanlab.data import cache, tokenizers
from titanlab.data.contract import DOCUMENT_MASK, DataSource, Report, Rows, Separators, Stream, check_separators
from titanlab.data.corpus import Corpus, corpus_of, is_held_out, library_of_python
from titanlab.data.schema import Files, Stdlib, Text, TokenFolder
from titanlab.data.shards import INDEX, ShardIndex, fingerprint_of, is_whole, read_index
from titanlab.data.source import check_sequences, check_validation, check_vocab_size
from titanlab.data.tokenizers import Tokenizer
from titanlab.errors import ConfigError

ORDER = 1
"""Increased when a code change gives other tokens for the same corpus, or another order of tokens."""

_TRIED_CHARACTERS = 4096
TextConfig = TypeVar("TextConfig", bound=Text)


class ShardSource(DataSource):
    """Token shards in a folder, which may not exist before `prepare`."""

    @property
    @abstractmethod
    def folder(self) -> Path: ...

    @property
    @abstractmethod
    def index(self) -> ShardIndex: ...

    @property
    @abstractmethod
    def held_out(self) -> tuple[str, object]:
        """The config key that decides which documents are held out, and the value of this key."""

    def separators(self) -> Separators:
        return Separators(begin=self.index.bos_id, end=self.index.eos_id)

    def open_train(self, *, seed: int, seq_len: int, **place: Any) -> Stream:
        # Imported here: it needs numpy, and the checks do not.
        from titanlab.data.indexed import NumberedStream, Split, shuffled

        check_sequences(self.index, seq_len)
        split = Split(self.folder, self.index, "train", seq_len)
        identity = {"fingerprint": self.fingerprint(), "seed": seed, "seq_len": seq_len}
        order = functools.partial(shuffled, seed=seed, n=split.sequences)
        return NumberedStream(order, split.gather, identity=identity, **place)

    def open_validation(self, *, seq_len: int, **how: int) -> Rows:
        from titanlab.data.indexed import HeldOutRows, Split

        check_validation(self.index, *self.held_out)
        split = Split(self.folder, self.index, "validation", seq_len)
        return HeldOutRows(split.padded_row, split.padded_rows(), seq_len=seq_len, **how)


class CachedText(ShardSource, Generic[TextConfig]):
    """Text that becomes token shards in the cache."""

    def __init__(self, config: TextConfig) -> None:
        self.config = config

    @abstractmethod
    def make(self, folder: Path, report: Report) -> None:
        """Fill an empty folder with the shards."""

    @functools.cached_property
    def index(self) -> ShardIndex:
        if not self.folder.is_dir():
            raise ConfigError("data", self.config.kind, f"{self.folder} is missing", "prepare the data first")
        return read_index(self.folder, "data")

    def prepare(self, *, report: Report) -> None:
        cache.build(self.folder, lambda folder: self.make(folder, report), report=report, is_whole=is_whole)

    def tokenizer(self) -> Tokenizer:
        # A tokenizer that the config names is read from its own file: this works on a machine without the corpus, too.
        return named_tokenizer(self.config) or tokenizers.load(self.folder / str(self.index.tokenizer))

    def tokenizer_identity(self) -> object:
        """Everything on which the tokens of a text depend, as plain values to hash."""
        named = named_tokenizer(self.config)
        return ["trained", self.config.vocab_size] if named is None else named.fingerprint

    def check_tokens(self, vocab_size: int) -> None:
        """Check that the model's vocabulary (`vocab_size`) is large enough, and that document masks are possible."""
        named = named_tokenizer(self.config)
        check_vocab_size(vocab_size, (named or self.config).vocab_size)
        if self.config.document_mask and named is not None:
            # Check only a named tokenizer: a tokenizer that is trained here has separators.
            cure = "try false, or a tokenizer with such a token"
            check_separators(tokenizers.separators_of(named), whose="the tokenizer", cure=cure)


class PreparedText(CachedText[Files | Stdlib]):
    """Files, or the standard library of this Python, that become token shards in the cache."""

    @functools.cached_property
    def corpus(self) -> Corpus:
        if isinstance(self.config, Stdlib):
            return library_of_python()
        return corpus_of(self.config.files, self.config.text_field)

    def fingerprint(self) -> str:
        return self._fingerprint

    @functools.cached_property
    def _fingerprint(self) -> str:
        tokenizer, content = self.tokenizer_identity(), content_of(self.corpus)
        return cache.hash_of_values(ORDER, content, self.corpus.text_field, tokenizer, self.config.validation_fraction)

    @functools.cached_property
    def folder(self) -> Path:
        return cache.root() / "tokens" / f"{self.config.kind}-{self.fingerprint()}"

    @property
    def held_out(self) -> tuple[str, object]:
        return "data.validation_fraction", self.config.validation_fraction

    def check(self, *, seq_len: int, vocab_size: int, validation_sequences: int, **_: int) -> None:
        whole = self.folder.is_dir() and is_whole(self.folder)
        if not whole:
            # Check the corpus before the vocabulary: a file without text must give its own error.
            self.corpus.check()
        self.check_tokens(vocab_size)
        if validation_sequences and not self.config.validation_fraction:
            check_validation(None, *self.held_out)
        if whole:
            check_sequences(self.index, seq_len)
            if validation_sequences:
                check_validation(self.index, *self.held_out)

    def make(self, folder: Path, report: Report) -> None:
        make_shards(folder, self.corpus, self.config, fingerprint=self.fingerprint(), report=report)


class TokenFolderSource(ShardSource):
    """The token shards in a folder."""

    def __init__(self, config: TokenFolder) -> None:
        self.config = config

    @property
    def folder(self) -> Path:
        return Path(self.config.folder)

    @property
    def held_out(self) -> tuple[str, object]:
        return "data.folder", self.config.folder

    @functools.cached_property
    def index(self) -> ShardIndex:
        return read_index(self.folder)

    def fingerprint(self) -> str:
        return fingerprint_of(self.folder, self.index)

    def prepare(self, *, report: Report) -> None:
        # The shards exist already. Check their tokens, because a wrong index would waste a run.
        from titanlab.data.indexed import check_documents, check_tokens

        check_tokens(self.folder, self.index)
        if self.config.document_mask:
            check_documents(self.folder, self.index, self.separators(), DOCUMENT_MASK)

    def tokenizer(self) -> Tokenizer | None:
        name = self.index.tokenizer
        return None if name is None else tokenizers.load(self.folder / name, "data.folder")

    def check(self, *, seq_len: int, vocab_size: int, validation_sequences: int, **_: int) -> None:
        check_vocab_size(vocab_size, self.index.vocab_size)
        check_sequences(self.index, seq_len)
        if self.config.document_mask:
            check_separators(self.separators(), whose=INDEX, cure="name bos_id or eos_id in it, or try false")
        if validation_sequences:
            check_validation(self.index, *self.held_out)


def named_tokenizer(config: Text) -> Tokenizer | None:
    """The tokenizer that the config names; None: a tokenizer is trained."""
    return None if config.tokenizer is None else tokenizers.load(Path(config.tokenizer))


def content_of(corpus: Corpus) -> str:
    try:
        return cache.hash_of_files(corpus.files)
    except OSError as error:
        rule = f"cannot be read ({error.strerror})"
        raise ConfigError(corpus.key, error.filename or "", rule, "check its permissions") from error


def make_shards(folder: Path, corpus: Corpus, config: Text, *, fingerprint: str, report: Report) -> ShardIndex:
    """Fill an empty folder with the token shards of a corpus; if the config names no tokenizer, train one first."""
    # Imported here: they need numpy or sentencepiece, and the checks do not.
    from titanlab.data import new_tokenizer, shards

    size = sum(file.stat().st_size for file in corpus.files)
    first = next(corpus.documents(), None)
    if first is None:
        raise ConfigError(corpus.key, corpus.files[0], "has no text", "give files with text")
    reader = named_tokenizer(config)
    if reader is not None and not reader.encode(first[:_TRIED_CHARACTERS]):
        rule = f"makes no token of the text of {corpus.files[0].name}: it has {reader.vocab_size} tokens"
        raise ConfigError("data.tokenizer", config.tokenizer, rule, "give a tokenizer that was trained on such text")
    report(f"reading {len(corpus.files):,} files, {size / 1e6:,.1f} MB: {corpus.in_words()}")
    if reader is None:
        reader = train_tokenizer(corpus.sample(new_tokenizer.SAMPLE_CHARACTERS), config, folder, report)
    started = time.monotonic()
    report("tokenising")
    index = shards.write_documents(
        folder,
        corpus.documents(),
        tokenizer=reader,
        fingerprint=fingerprint,
        report=report,
        held_out=lambda text: is_held_out(text, config.validation_fraction),
        tail_fraction=config.validation_fraction,
    )
    report(
        f"{index.tokens('train'):,} tokens to train on and {index.tokens('validation'):,} held out "
        f"after {time.monotonic() - started:.1f} s"
    )
    return index


def train_tokenizer(texts: Iterable[str], config: Text, folder: Path, report: Report) -> Tokenizer:
    """Train a tokenizer, write it to a folder of token shards, and report the time."""
    from titanlab.data import new_tokenizer

    started, file = time.monotonic(), folder / "tokenizer.model"
    report(f"training a tokenizer of {config.vocab_size:,} pieces")
    new_tokenizer.train_sentencepiece(texts, vocab_size=config.vocab_size, file=file)
    report(f"trained it in {time.monotonic() - started:.1f} s")
    return tokenizers.load(file)


# Texts in the cures (advice) of errors about data=files → what to write instead on the command line.
_CURES = {"data.tokenizer": "--tokenizer", "data.files=": "", "null to train one": "leave it out to train one"}


def write_token_shards(
    files: str, folder: Path, *, vocab_size: int = 32768, report: Callable[[str], None], **how: Any
) -> ShardIndex:
    """Tokenise files into a new folder of token shards, which appears complete or not at all.

    Args:
        files: a file, folder or glob, several separated by `:`; as in `schema.Files`.
        folder: the folder to make; its parents are made too. It may exist if it is empty.
        how: `tokenizer`, `text_field` and `validation_fraction`, as in `schema.Files`.

    Raises:
        ConfigError: the files, the tokenizer or the folder cannot be used; keys are `files`, `folder`,
            `--tokenizer`, `--text-field`, `--vocab-size` and `--validation-fraction`, as on the command line.
    """
    try:
        config = Files(files=files, vocab_size=vocab_size, **how)
        corpus = corpus_of(config.files, config.text_field)
        corpus.check()
        named = named_tokenizer(config)
        folder = folder.absolute()
        fingerprint = cache.hash_of_values(
            ORDER,
            content_of(corpus),
            config.text_field,
            named and named.fingerprint,
            vocab_size,
            config.validation_fraction,
        )
        try:
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise ConfigError("folder", folder, "exists already", "name another, or remove it")
            folder.parent.mkdir(parents=True, exist_ok=True)
            with cache.beside(folder, f".{folder.name}.making-") as temporary:
                return make_shards(temporary, corpus, config, fingerprint=fingerprint, report=report)
        except OSError as error:
            cure = "make room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "name a folder you can write to"
            rule = f"cannot be written ({error.strerror or error})"
            raise ConfigError("folder", folder, rule, cure) from error
    except ConfigError as error:
        # Name command-line options instead of the config keys that the checks of data=files name.
        if not error.key.startswith("data"):
            raise
        name = error.key.removeprefix("data").lstrip(".") or "files"
        key = name if name == "files" else "--" + name.replace("_", "-")
        cure = error.cure
        for text, here in _CURES.items():
            cure = cure.replace(text, here)
        raise ConfigError(key, error.value, error.rule, cure) from error
