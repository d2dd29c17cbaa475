"""data=tokens: a folder of existing token shards."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from titanlab.data.contract import DataSource
from titanlab.data.documents import KEY, Separators, check_separators
from titanlab.data.rules import check_sequences, check_validation, check_vocab_size
from titanlab.data.shards.index import INDEX, Index, fingerprint_of, read_index
from titanlab.data.streams.stream import Report, Rows, State, Stream
from titanlab.data.tokenizers import tokenizer as tokenizers
from titanlab.data.tokenizers.tokenizer import Tokenizer
from titanlab.data.tokens_schema import TokenFolder


@dataclass(frozen=True)
class TokenFolderSource(DataSource):
    """The token shards in a folder."""

    config: TokenFolder

    @property
    def folder(self) -> Path:
        """Where the shards are."""
        return Path(self.config.folder)

    @cached_property
    def index(self) -> Index:
        """The folder's index."""
        return read_index(self.folder)

    def fingerprint(self) -> str:
        return fingerprint_of(self.folder, self.index)

    def prepare(self, *, report: Report) -> None:
        # The shards exist; only their tokens are checked, because a wrong index would waste a run.
        from titanlab.data.shards.split import check_documents, check_tokens

        check_tokens(self.folder, self.index)
        if self.config.document_mask:
            check_documents(self.folder, self.index, self.separators(), KEY)

    def tokenizer(self) -> Tokenizer | None:
        name = self.index.tokenizer
        return None if name is None else tokenizers.load(self.folder / name, "data.folder")

    def vocab_size(self) -> int:
        return self.index.vocab_size

    def separators(self) -> Separators:
        return Separators(begin=self.index.bos_id, end=self.index.eos_id)

    def check(self, *, seq_len: int, vocab_size: int, validation_sequences: int, **_: int) -> None:
        check_vocab_size(vocab_size, self.index.vocab_size)
        check_sequences(self.index, seq_len)
        if self.config.document_mask:
            check_separators(self.separators(), whose=INDEX, cure="name bos_id or eos_id in it, or try false")
        if validation_sequences:
            check_validation(self.index, "data.folder", self.config.folder)

    def open_train(self, *, state: State | None, **how: Any) -> Stream:
        # Imported here: it needs numpy, and the checks do not.
        from titanlab.data.streams import indexed

        return indexed.open_train(self.folder, self.index, fingerprint=self.fingerprint(), state=state, **how)

    def open_validation(self, **how: int) -> Rows:
        from titanlab.data.streams import indexed

        folder = self.config.folder
        return indexed.open_validation(self.folder, self.index, key="data.folder", value=folder, **how)
