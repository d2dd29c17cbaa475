"""data=synthetic: random tokens, computed from seed, sample and position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from titanlab.data.contract import DataSource, Report, Rows, Separators, State, Stream
from titanlab.data.schema import Synthetic
from titanlab.data.source import check_vocab_size

END = 0
"""The token that ends a document, where there are documents."""


@dataclass(frozen=True)
class SyntheticSource(DataSource):
    """Random tokens."""

    config: Synthetic

    def fingerprint(self) -> str:
        documents = f"-documents-{self.config.document_tokens}" if self.config.document_mask else ""
        return f"synthetic-1-{self.config.vocab_size}" + ("-gaps" if self.config.gaps else "") + documents

    def prepare(self, *, report: Report) -> None:
        """There is nothing to do."""

    def tokenizer(self) -> None:
        return None

    def vocab_size(self) -> int:
        return self.config.vocab_size

    def separators(self) -> Separators:
        return Separators(end=END)

    def check(self, *, vocab_size: int, **_: int) -> None:
        check_vocab_size(vocab_size, self.config.vocab_size)

    def open_train(self, *, state: State | None, **how: Any) -> Stream:
        # Imported here: it needs numpy, and the checks do not.
        from titanlab.data.random_tokens import RandomStream

        return RandomStream(
            self.config.vocab_size,
            gaps=self.config.gaps,
            document_tokens=self._document_tokens,
            fingerprint=self.fingerprint(),
            state=state,
            **how,
        )

    def open_validation(self, **how: int) -> Rows:
        from titanlab.data.random_tokens import RandomRows

        return RandomRows(self.config.vocab_size, document_tokens=self._document_tokens, **how)

    @property
    def _document_tokens(self) -> int | None:
        return self.config.document_tokens if self.config.document_mask else None
