"""Config of data=tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

from titanlab.data.contract import DataConfig, DataSource
from titanlab.data.text_schema import absolute
from titanlab.errors import ConfigError
from titanlab.options import option


@option("data", "tokens")
@dataclass(kw_only=True)
class TokenFolder(DataConfig):
    """Existing token shards, made by `titanlab tokenize` or by another tool.

    Attributes:
        folder: contains `index.json` and the shards that it names.
        document_mask: attention stays within each document, and positions restart at its first token; what a sequence
            cuts off a document is a document of its own. Documents are told apart by `bos_id` and `eos_id` of the
            index.
    """

    kind: str = "tokens"
    folder: str = field(default="", metadata={"identity": False})
    document_mask: bool = field(default=False, metadata={"before": False})

    def __post_init__(self) -> None:
        if not self.folder.strip():
            raise ConfigError(
                "data.folder",
                self.folder,
                "names no folder",
                "make one with `titanlab tokenize`: data.folder=<it>",
            )
        self.folder = absolute(self.folder)

    def implementation(self) -> DataSource:
        from titanlab.data.tokens import TokenFolderSource

        return TokenFolderSource(self)
