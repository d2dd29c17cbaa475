"""Documents in packed sequences: the tokens that separate them, and where each token's document begins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from titanlab.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

KEY = "data.document_mask"


@dataclass(frozen=True, kw_only=True)
class Separators:
    """The tokens around each document.

    Attributes:
        begin: the first token of every document; None: documents have no such token.
        end: the last token of every document; None: documents have no such token.
    """

    begin: int | None = None
    end: int | None = None

    @property
    def separate(self) -> bool:
        """Whether there is a token that says where a document begins."""
        return self.begin is not None or self.end is not None

    def starts(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The place in its sequence where each token's document begins: `[batch, seq]` → int64 `[batch, seq]`.

        A document that began in an earlier sequence begins at 0. One token that both begins and ends documents
        separates them where it comes twice in a row.
        """
        import numpy as np

        first = np.zeros(tokens.shape, dtype=bool)
        begins, ends = (np.zeros_like(first) if token is None else tokens == token for token in (self.begin, self.end))
        if self.begin == self.end:
            first[:, 1:] = begins[:, 1:] & ends[:, :-1]
        else:
            first[:, 1:] = begins[:, 1:] | ends[:, :-1]
        places = np.arange(tokens.shape[1], dtype=np.int64)
        return np.maximum.accumulate(np.where(first, places, 0), axis=1)


def check_separators(separators: Separators, *, whose: str, cure: str) -> None:
    """Check that documents can be told apart.

    Args:
        whose: who names the tokens, such as `the tokenizer`.

    Raises:
        ConfigError: there is neither a token that begins a document nor one that ends it.
    """
    if not separators.separate:
        rule = f"{whose} has neither a token that begins a document nor one that ends it"
        raise ConfigError(KEY, True, rule, cure)
