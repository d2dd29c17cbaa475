"""Config of data=hf and of named datasets, such as data=c4."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from titanlab.data.contract import DataSource
from titanlab.data.text_schema import Text, absolute
from titanlab.errors import ConfigError
from titanlab.options import option

LOCAL_BUILDERS = ("json", "parquet", "text", "csv", "arrow")
"""Values of `path` that name a format; `data_files` then are files on this machine."""


@option("data", "hf")
@dataclass(kw_only=True)
class HuggingFace(Text):
    """Any dataset that Hugging Face `datasets` can stream.

    Attributes:
        path: a dataset on the hub (`allenai/c4`), a folder, or a format (`json`, `parquet`) of `data_files`.
        name: configuration of the dataset, such as `en`.
        revision: branch, tag or commit on the hub; a commit makes a run repeatable.
        data_files: files or globs, for a format or for a part of a dataset.
        split: the split to train on.
        validation_split: the split to validate on; null holds `validation_fraction` of the documents of `split` out.
        validation_documents: number of documents that are read and kept for validation; 0: none.
        text_field: column of the text.
        streams: number of virtual streams, a multiple of the data-parallel processes: 24 for 1, 2, 3, 4, 6, 8, 12 or
            24 of them, 96 or 768 for more. The order of tokens depends on it, never on the number of processes: keep
            it where a training continues on another number.
        prefetch: batches that a thread prepares ahead; 0: none.
    """

    kind: str = "hf"
    # The data's fingerprint has the content of a local folder, and the name of a dataset on the hub.
    path: str = field(default="", metadata={"identity": False})
    name: str | None = None
    revision: str | None = None
    data_files: list[str] = field(default_factory=list, metadata={"identity": False})
    split: str = "train"
    validation_split: str | None = None
    validation_documents: int = 1000
    text_field: str = "text"
    streams: int = 24
    prefetch: int = field(default=2, metadata={"identity": False})

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.path.strip():
            raise ConfigError(
                "data.path", self.path, "names no dataset", "give one of the hub, such as data.path=allenai/c4"
            )
        for name, least in (("streams", 1), ("validation_documents", 0), ("prefetch", 0)):
            value = getattr(self, name)
            if value < least:
                raise ConfigError(f"data.{name}", value, f"must be at least {least}", f"try {self._default(name)}")
        for name in ("split", "text_field"):
            if not getattr(self, name):
                raise ConfigError(f"data.{name}", "", "must not be empty", f"try {self._default(name)}")
        if self.path == "pandas":
            # Earlier versions of `datasets` unpickle the files.
            raise ConfigError("data.path", self.path, "reads pickles, which can run code", "convert them to parquet")
        if self.path in LOCAL_BUILDERS:
            if not self.data_files:
                raise ConfigError(
                    "data.data_files", [], f"path={self.path} needs files", "try 'data.data_files=[corpus/*.jsonl]'"
                )
            self.data_files = [file if "://" in file else absolute(file) for file in self.data_files]
        elif os.path.isdir(os.path.expanduser(self.path)):
            self.path = absolute(self.path)

    def _default(self, name: str) -> object:
        return type(self).__dataclass_fields__[name].default

    def implementation(self) -> DataSource:
        from titanlab.data.hf import HuggingFaceSource

        return HuggingFaceSource(self)
