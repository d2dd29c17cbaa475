"""Config of data=files."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from titanlab.data.contract import DataSource
from titanlab.data.text_schema import Text, absolute
from titanlab.errors import ConfigError
from titanlab.options import option


@option("data", "files")
@dataclass(kw_only=True)
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
            raise ConfigError(
                "data.files", self.files, "names no file", "give a file, a folder or a glob: data.files=corpus/*.jsonl"
            )
        if "://" in self.files:
            rule, cure = "is an address, and files are read from folders of this host", "copy it here, or try data=hf"
            raise ConfigError("data.files", self.files, rule, cure)
        parts = [part for part in self.files.split(os.pathsep) if part.strip()]
        if any(os.pathsep in absolute(part) for part in parts):
            rule = f"is relative to {os.getcwd()}, whose {os.pathsep!r} separates files"
            raise ConfigError("data.files", self.files, rule, "start in a folder without, or give an absolute path")
        self.files = os.pathsep.join(map(absolute, parts))
        if not self.text_field:
            raise ConfigError("data.text_field", self.text_field, "names no field", "try text")

    def implementation(self) -> DataSource:
        from titanlab.data.files import FilesSource

        return FilesSource(self)
