"""Configs of all kinds of data."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from titanlab.data.contract import DataConfig, DataSource
from titanlab.errors import ConfigError
from titanlab.options import NOT_PRICED, option

SMALLEST_VOCABULARY = 320
"""256 bytes, three special tokens and room for the characters of a plain text."""


@dataclass(frozen=True, kw_only=True)
class Text(DataConfig):
    """Text that becomes tokens.

    Attributes:
        tokenizer: a SentencePiece `.model`, an HF `tokenizer.json`, or a folder with one of them; null: train
            a SentencePiece BPE on the text itself.
        vocab_size: of the tokenizer to train; not used if `tokenizer` names one.
        validation_fraction: fraction of the documents to hold out of training, chosen by a hash of their content.
        document_mask: attention stays within each document, and positions restart at its first token; a part of a
            document that a sequence cuts off counts as a separate document.
    """

    # The tokenizer's path is not part of the run's identity: the data's fingerprint has the file's content.
    tokenizer: str | None = field(default=None, metadata={"identity": False})
    # Small, so that the embedding of a small model has fewer parameters than its transformer blocks.
    vocab_size: int = 2048
    validation_fraction: float = 0.01
    document_mask: bool = field(default=False, metadata={"before": False, **NOT_PRICED})

    def __post_init__(self) -> None:
        if self.vocab_size < SMALLEST_VOCABULARY:
            rule = f"must be at least {SMALLEST_VOCABULARY}: all bytes, special tokens and some characters"
            raise ConfigError("data.vocab_size", self.vocab_size, rule, "try 2048")
        if not 0 <= self.validation_fraction <= 0.5:
            cure = "try 0.01, or 0 to hold nothing out"
            raise ConfigError("data.validation_fraction", self.validation_fraction, "must be between 0 and 0.5", cure)
        if self.tokenizer is not None:
            object.__setattr__(self, "tokenizer", absolute(self.tokenizer))


def absolute(path: str) -> str:
    """The path made absolute: a run may be resumed from another working directory."""
    return os.path.abspath(os.path.expanduser(path))


@option("data", "files")
@dataclass(frozen=True, kw_only=True)
class Files(Text):
    """Text, JSONL or parquet files.

    Attributes:
        files: a file, a folder (with all files below it) or a glob in which `**` matches any folders;
            several are separated by `:`. The ending decides the format: `.jsonl`, `.ndjson` or `.json` has one
            JSON object per line, `.parquet` is parquet, any other file is one text document. `.gz`, `.bz2`, `.xz`
            or `.zst` may follow, except after parquet. Tables such as `.csv` are refused.
        text_field: key or column of the text in JSONL and parquet.
    """

    kind: str = "files"
    files: str = field(default="", metadata={"identity": False})
    text_field: str = "text"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.files.strip():
            cure = "give a file, a folder or a glob: data.files=corpus/*.jsonl"
            raise ConfigError("data.files", self.files, "names no file", cure)
        if "://" in self.files:
            rule, cure = "is an address, and files are read from folders of this host", "copy it here, or try data=hf"
            raise ConfigError("data.files", self.files, rule, cure)
        parts = filter(str.strip, self.files.split(os.pathsep))
        object.__setattr__(self, "files", os.pathsep.join(map(absolute, parts)))
        if not self.text_field:
            raise ConfigError("data.text_field", self.text_field, "names no field", "try text")

    def implementation(self) -> DataSource:
        from titanlab.data.text import PreparedText

        return PreparedText(self)


@option("data", "stdlib")
@dataclass(frozen=True, kw_only=True)
class Stdlib(Text):
    """The source of this Python's standard library: real text on every machine, without a network."""

    kind: str = "stdlib"
    # Hold out some twenty modules: enough for a steady validation loss.
    validation_fraction: float = 0.05

    def implementation(self) -> DataSource:
        from titanlab.data.text import PreparedText

        return PreparedText(self)


LOCAL_BUILDERS = ("json", "parquet", "text", "csv", "arrow")
"""Values of `path` that name a format; `data_files` then are files on this machine."""


@option("data", "hf")
@dataclass(frozen=True, kw_only=True)
class HuggingFace(Text):
    """Any dataset that Hugging Face `datasets` can stream.

    Attributes:
        path: a dataset on the hub (`allenai/c4`), a folder, or a format (`json`, `parquet`) of `data_files`.
        name: configuration of the dataset, such as `en`.
        revision: branch, tag or commit on the hub; a commit makes a run repeatable.
        data_files: files or globs, for a format or for a part of a dataset.
        split: the split to train on.
        validation_split: the split to validate on; null: hold out `validation_fraction` of the documents of `split`.
        validation_documents: number of documents that are read and kept for validation; 0: none.
        text_field: column of the text.
        streams: number of virtual streams, a multiple of the data-parallel processes: 24 for 1, 2, 3, 4, 6, 8, 12 or 24
            of them, 96 or 768 for more. The order of tokens depends on this number, never on the number of processes:
            keep it when a training continues on another number of processes.
        prefetch: batches that a thread prepares ahead; 0: none.
    """

    kind: str = "hf"
    # The path is not part of the run's identity: the data's fingerprint has a folder's content, or a hub's name.
    path: str = field(default="", metadata={"identity": False})
    name: str | None = None
    revision: str | None = None
    data_files: tuple[str, ...] = field(default=(), metadata={"identity": False})
    split: str = "train"
    validation_split: str | None = None
    validation_documents: int = field(default=1000, metadata={"least": 0})
    text_field: str = "text"
    streams: int = field(default=24, metadata={"least": 1})
    prefetch: int = field(default=2, metadata={"identity": False, "least": 0})

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.path.strip():
            cure = "give one of the hub, such as data.path=allenai/c4"
            raise ConfigError("data.path", self.path, "names no dataset", cure)
        if self.path == "pandas":
            # Refuse, because earlier versions of `datasets` unpickle such files.
            raise ConfigError("data.path", self.path, "reads pickles, which can run code", "convert them to parquet")
        if self.path in LOCAL_BUILDERS:
            if not self.data_files:
                cure = "try 'data.data_files=[corpus/*.jsonl]'"
                raise ConfigError("data.data_files", [], f"path={self.path} needs files", cure)
            files = tuple(file if "://" in file else absolute(file) for file in self.data_files)
            object.__setattr__(self, "data_files", files)
        elif os.path.isdir(os.path.expanduser(self.path)):
            object.__setattr__(self, "path", absolute(self.path))

    def implementation(self) -> DataSource:
        from titanlab.data.hf import HuggingFaceSource

        return HuggingFaceSource(self)


@option("data", "tokens")
@dataclass(frozen=True, kw_only=True)
class TokenFolder(DataConfig):
    """Existing token shards, made by `titanlab tokenize` or by another tool.

    Attributes:
        folder: contains `index.json` and the shards that it names.
        document_mask: attention stays within each document, and positions restart at its first token; a part of a
            document that a sequence cuts off counts as a separate document. `bos_id` and `eos_id` of the index separate
            documents.
    """

    kind: str = "tokens"
    folder: str = field(default="", metadata={"identity": False})
    document_mask: bool = field(default=False, metadata={"before": False, **NOT_PRICED})

    def __post_init__(self) -> None:
        if not self.folder.strip():
            cure = "make one with `titanlab tokenize`: data.folder=<it>"
            raise ConfigError("data.folder", self.folder, "names no folder", cure)
        object.__setattr__(self, "folder", absolute(self.folder))

    def implementation(self) -> DataSource:
        from titanlab.data.text import TokenFolderSource

        return TokenFolderSource(self)


@option("data", "synthetic")
@dataclass(frozen=True, kw_only=True)
class Synthetic(DataConfig):
    """Random tokens, computed and not read: for benchmarks, in which no step may wait for data.

    Attributes:
        vocab_size: tokens are drawn uniformly from [0, vocab_size).
        gaps: labels at the beginning of sequences do not count: in four sequences none, a quarter, a half and three
            quarters of them. For proofs: the mean over one rank's labels then differs from the mean over all.
        document_mask: sequences consist of documents that end with token 0; attention stays within each document, and
            positions restart.
        document_tokens: mean number of tokens in a document; lengths have a geometric distribution.
    """

    kind: str = "synthetic"
    vocab_size: int = 2048
    gaps: bool = field(default=False, metadata={"before": False})
    document_mask: bool = field(default=False, metadata={"before": False, **NOT_PRICED})
    document_tokens: int = field(default=256, metadata={"before": 256, "least": 1, **NOT_PRICED})

    def __post_init__(self) -> None:
        if not 2 <= self.vocab_size <= 2**31:
            raise ConfigError("data.vocab_size", self.vocab_size, "must be between 2 and 2147483648", "try 2048")

    def implementation(self) -> DataSource:
        from titanlab.data.synthetic import SyntheticSource

        return SyntheticSource(self)
