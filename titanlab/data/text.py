"""Data in token shards: shards of text, made in the cache or by `titanlab tokenize`, and existing ones."""

from __future__ import annotations

import errno
import os
import sysconfig
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

from titanlab.data import cache, tokenizers
from titanlab.data.contract import DOCUMENT_MASK, DataSource, Report, Rows, Separators, State, Stream, check_separators
from titanlab.data.corpus import Corpus, corpus_of, is_held_out
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
    """Token shards in a folder."""

    @property
    @abstractmethod
    def folder(self) -> Path:
        """The folder of the shards, which may not exist before `prepare`."""

    @property
    @abstractmethod
    def index(self) -> ShardIndex:
        """The index of the shards.

        Raises:
            ConfigError: there are no shards.
        """

    @property
    @abstractmethod
    def held_out(self) -> tuple[str, object]:
        """The config key that decides which documents are held out, and its value."""

    def vocab_size(self) -> int:
        return self.index.vocab_size

    def separators(self) -> Separators:
        return Separators(begin=self.index.bos_id, end=self.index.eos_id)

    def open_train(self, *, state: State | None, **how: Any) -> Stream:
        # Imported here: it needs numpy, and the checks do not.
        from titanlab.data import indexed

        return indexed.open_train(self.folder, self.index, fingerprint=self.fingerprint(), state=state, **how)

    def open_validation(self, **how: int) -> Rows:
        from titanlab.data import indexed

        key, value = self.held_out
        return indexed.open_validation(self.folder, self.index, key=key, value=value, **how)


class CachedText(ShardSource, Generic[TextConfig]):
    """Text that becomes token shards in the cache."""

    def __init__(self, config: TextConfig) -> None:
        self.config = config

    @abstractmethod
    def make(self, folder: Path, report: Report) -> None:
        """Fill an empty folder with the shards."""

    @property
    def name(self) -> str:
        """Names the data in errors."""
        return self.config.kind

    @cached_property
    def index(self) -> ShardIndex:
        folder = self.folder
        if not folder.is_dir():
            raise ConfigError("data", self.name, f"{folder} is missing", "prepare the data first")
        return read_index(folder, "data")

    def prepare(self, *, report: Report) -> None:
        cache.build(self.folder, lambda folder: self.make(folder, report), report=report, is_whole=is_whole)

    def tokenizer(self) -> Tokenizer:
        # A tokenizer that the config names needs no corpus: text may be generated on a machine without the corpus.
        if self.config.tokenizer is not None:
            return tokenizers.load(Path(self.config.tokenizer))
        index = self.index
        return tokenizers.load(self.folder / str(index.tokenizer))

    def tokenizer_identity(self) -> object:
        """All values on which the tokens of a text depend, as plain values."""
        if self.config.tokenizer is None:
            return ["trained", self.config.vocab_size]
        return tokenizers.load(Path(self.config.tokenizer)).fingerprint

    def check_tokens(self, vocab_size: int) -> None:
        """Check the rules for the vocabulary of the model, of `vocab_size`, and for document masks.

        Raises:
            ConfigError: a rule is broken.
        """
        config = self.config
        check_vocab_size(vocab_size, config.vocab_size if config.tokenizer is None else self.tokenizer().vocab_size)
        if config.document_mask and config.tokenizer is not None:
            # A tokenizer that is trained here has such tokens.
            cure = "try false, or a tokenizer with such a token"
            check_separators(tokenizers.separators_of(self.tokenizer()), whose="the tokenizer", cure=cure)


class PreparedText(CachedText[TextConfig]):
    """A corpus that becomes token shards in the cache."""

    @abstractmethod
    def find_corpus(self) -> Corpus:
        """The documents.

        Raises:
            ConfigError: there are no documents.
        """
        ...

    @cached_property
    def corpus(self) -> Corpus:
        return self.find_corpus()

    @cached_property
    def _fingerprint(self) -> str:
        tokenizer, content = self.tokenizer_identity(), content_of(self.corpus)
        return cache.hash_of_values(ORDER, content, self.corpus.text_field, tokenizer, self.config.validation_fraction)

    def fingerprint(self) -> str:
        return self._fingerprint

    @property
    def folder(self) -> Path:
        return cache.root() / "tokens" / f"{self.config.kind}-{self.fingerprint()}"

    @property
    def held_out(self) -> tuple[str, object]:
        return "data.validation_fraction", self.config.validation_fraction

    def check(self, *, seq_len: int, vocab_size: int, validation_sequences: int, **_: int) -> None:
        folder = self.folder
        whole = folder.is_dir() and is_whole(folder)
        if not whole:
            # Before the vocabulary: a file without text must give its own error.
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


def content_of(corpus: Corpus) -> str:
    """A hash of a corpus's files; 32 hexadecimal digits.

    Raises:
        ConfigError: a file cannot be read.
    """
    try:
        return cache.hash_of_files(corpus.files)
    except OSError as error:
        rule = f"cannot be read ({error.strerror})"
        raise ConfigError(corpus.key, error.filename or "", rule, "check its permissions") from error


def make_shards(folder: Path, corpus: Corpus, config: Text, *, fingerprint: str, report: Report) -> ShardIndex:
    """Fill an empty folder with the token shards of a corpus; if the config names no tokenizer, train one first.

    Raises:
        ConfigError: the corpus or the tokenizer cannot be used.
    """
    size = sum(file.stat().st_size for file in corpus.files)
    first = next(corpus.documents(), None)
    if first is None:
        raise ConfigError(corpus.key, corpus.files[0], "has no text in it", "give files with text in them")
    reader = None if config.tokenizer is None else tokenizers.load(Path(config.tokenizer))
    if reader is not None and not reader.encode(first[:_TRIED_CHARACTERS]):
        rule = f"makes no token of the text of {corpus.files[0].name}: it has {reader.vocab_size} tokens"
        raise ConfigError("data.tokenizer", config.tokenizer, rule, "give a tokenizer that was trained on such text")
    report(f"reading {len(corpus.files):,} files, {size / 1e6:,.1f} MB: {corpus.in_words()}")
    # Imported here: they need numpy or sentencepiece, and the checks do not.
    from titanlab.data import new_tokenizer, shards

    if reader is None:
        sample = corpus.sample(new_tokenizer.SAMPLE_CHARACTERS)
        file = folder / "tokenizer.model"
        reader = train_tokenizer(sample, vocab_size=config.vocab_size, file=file, report=report)
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


def train_tokenizer(texts: Iterable[str], *, vocab_size: int, file: Path, report: Report) -> Tokenizer:
    """Train a tokenizer and report it.

    Raises:
        ConfigError: the texts are too few for the vocabulary.
    """
    from titanlab.data import new_tokenizer

    started = time.monotonic()
    report(f"training a tokenizer of {vocab_size:,} pieces")
    new_tokenizer.train_sentencepiece(texts, vocab_size=vocab_size, file=file)
    report(f"trained it in {time.monotonic() - started:.1f} s")
    return tokenizers.load(file)


class FilesSource(PreparedText[Files]):
    """The files that a config names."""

    def find_corpus(self) -> Corpus:
        return corpus_of(self.config.files, self.config.text_field)


# Installed packages, folders that only some systems have, and tables of characters, which are useless as training text.
_LEFT_OUT = {
    "__pycache__",
    "__phello__",
    "dist-packages",
    "encodings",
    "ensurepip",
    "idlelib",
    "lib-dynload",
    "lib2to3",
    "site-packages",
    "test",
    "tests",
    "turtledemo",
}
# These files contain paths of the machine that built this Python.
_BUILT = ("_sysconfigdata", "_sysconfig_vars")


class StdlibSource(PreparedText[Stdlib]):
    """The standard library of this Python."""

    def find_corpus(self) -> Corpus:
        folder = Path(sysconfig.get_path("stdlib"))
        files = source_files(folder)
        if not files:
            rule = f"this Python came without the source of its library ({folder})"
            raise ConfigError("data", "stdlib", rule, "try data=files")
        return Corpus(files=files, key="data", strict=False)


def source_files(folder: Path) -> tuple[Path, ...]:
    """Python files of a standard library, sorted by their path in it."""
    sources: list[Path] = []
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _LEFT_OUT and not name.startswith("config-"))
        sources += [Path(place, file) for file in files if file.endswith(".py") and not file.startswith(_BUILT)]
    return tuple(sorted(sources, key=lambda file: file.relative_to(folder).parts))


@dataclass(frozen=True)
class TokenFolderSource(ShardSource):
    """The token shards in a folder."""

    config: TokenFolder

    @property
    def folder(self) -> Path:
        return Path(self.config.folder)

    @cached_property
    def index(self) -> ShardIndex:
        return read_index(self.folder)

    def fingerprint(self) -> str:
        return fingerprint_of(self.folder, self.index)

    def prepare(self, *, report: Report) -> None:
        # The shards exist; only their tokens are checked, because a wrong index would waste a run.
        from titanlab.data.indexed import check_documents, check_tokens

        check_tokens(self.folder, self.index)
        if self.config.document_mask:
            check_documents(self.folder, self.index, self.separators(), DOCUMENT_MASK)

    def tokenizer(self) -> Tokenizer | None:
        name = self.index.tokenizer
        return None if name is None else tokenizers.load(self.folder / name, "data.folder")

    @property
    def held_out(self) -> tuple[str, object]:
        return "data.folder", self.config.folder

    def check(self, *, seq_len: int, vocab_size: int, validation_sequences: int, **_: int) -> None:
        check_vocab_size(vocab_size, self.index.vocab_size)
        check_sequences(self.index, seq_len)
        if self.config.document_mask:
            check_separators(self.separators(), whose=INDEX, cure="name bos_id or eos_id in it, or try false")
        if validation_sequences:
            check_validation(self.index, *self.held_out)


# Words in the cures of data=files → the same on the command line.
_CURES = {"data.tokenizer": "--tokenizer", "data.files=": "", "null to train one": "leave it out to train one"}


def write_token_shards(
    files: str,
    folder: Path,
    *,
    tokenizer: str | None = None,
    vocab_size: int = 32768,
    text_field: str = "text",
    validation_fraction: float = 0.01,
    report: Callable[[str], None],
) -> ShardIndex:
    """Tokenise files into a new folder of token shards, which appears complete or not at all.

    Args:
        files: a file, folder or glob, several separated by `:`; as in `schema.Files`.
        folder: the folder to make, with its parent; it may exist if it is empty.
        tokenizer, vocab_size, text_field, validation_fraction: as in `schema.Files`.

    Raises:
        ConfigError: the files, the tokenizer or the folder cannot be used; keys are `files`, `folder`,
            `--tokenizer`, `--text-field`, `--vocab-size` and `--validation-fraction`, as on the command line.
    """
    try:
        config = Files(
            files=files,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            text_field=text_field,
            validation_fraction=validation_fraction,
        )
        corpus = corpus_of(config.files, text_field)
        corpus.check()
        tokenizer_fingerprint = (
            None if config.tokenizer is None else tokenizers.load(Path(config.tokenizer)).fingerprint
        )
        content = content_of(corpus)
        folder = folder.absolute()
        fingerprint = cache.hash_of_values(
            ORDER, content, text_field, tokenizer_fingerprint, vocab_size, validation_fraction
        )
        try:
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise ConfigError("folder", folder, "is there already", "name another, or remove it")
            folder.parent.mkdir(parents=True, exist_ok=True)
            with cache.beside(folder, f".{folder.name}.making-") as temporary:
                return make_shards(temporary, corpus, config, fingerprint=fingerprint, report=report)
        except OSError as error:
            cure = "make room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "name a folder you can write to"
            rule = f"cannot be written ({error.strerror or error})"
            raise ConfigError("folder", folder, rule, cure) from error
    except ConfigError as error:
        # The checks of data=files name config keys; here the values come from the command line.
        if not error.key.startswith("data"):
            raise
        name = error.key.removeprefix("data").lstrip(".") or "files"
        key = name if name == "files" else "--" + name.replace("_", "-")
        cure = error.cure
        for text, here in _CURES.items():
            cure = cure.replace(text, here)
        raise ConfigError(key, error.value, error.rule, cure) from error
