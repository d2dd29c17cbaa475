"""One virtual stream: documents packed into sequences, from any position on."""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from titanlab.data.streams.stream import damaged

Position = dict[str, Any]


class Documents(Protocol):
    """An endless sequence of tokenised documents, with a position to resume from."""

    def position(self) -> Position:
        """The position of the next document, as JSON; documents opened at it continue with the same documents."""
        ...

    def next(self) -> npt.NDArray[np.uint32]:
        """The next document, uint32 `[tokens]`, with its special tokens."""
        ...

    def close(self) -> None:
        """Close the files or connections from which the documents are read."""
        ...


class PackedStream:
    """Cuts concatenated documents into sequences.

    Sequence k covers tokens [k·seq, (k+1)·seq] of the concatenated documents; its last token is only a label, and
    the first token of the next sequence. Every token is an input exactly once.

    Args:
        documents: opened at the position of a state, or at the beginning.
        seq_len: tokens of a sequence.
        offset: tokens of the first document that were used before; from a state.

    Raises:
        DamagedPosition: the first document has no more tokens than `offset`.
    """

    def __init__(self, documents: Documents, *, seq_len: int, offset: int = 0) -> None:
        self._documents, self._seq_len = documents, seq_len
        # Documents with tokens that are not used yet, each with its position.
        self._open: deque[tuple[Position, npt.NDArray[np.uint32]]] = deque()
        self._offset = offset
        self._ready = -offset
        if offset:
            self._read()
            if self._ready <= 0:
                raise damaged("parts", offset, "has an offset that its document does not have")

    def next_sequence(self) -> npt.NDArray[np.uint32]:
        """The next sequence and the label of its last token, uint32 `[seq + 1]`."""
        while self._ready < self._seq_len + 1:
            self._read()
        sequence = self._first(self._seq_len + 1)
        self._offset += self._seq_len
        self._ready -= self._seq_len
        while self._offset >= len(self._open[0][1]):
            self._offset -= len(self._open.popleft()[1])
        return sequence

    def _read(self) -> None:
        position = self._documents.position()
        tokens = self._documents.next()
        self._open.append((position, tokens))
        self._ready += len(tokens)

    def _first(self, count: int) -> npt.NDArray[np.uint32]:
        first = np.empty(count, dtype=np.uint32)
        filled, start = 0, self._offset
        for _, tokens in self._open:
            piece = tokens[start : start + count - filled]
            first[filled : filled + len(piece)] = piece
            filled, start = filled + len(piece), 0
        return first

    def close(self) -> None:
        """Close the documents."""
        self._documents.close()

    def state(self) -> dict[str, Any]:
        """`position` of the document that contains the next token, and `offset` of the token in it."""
        position = self._open[0][0] if self._open else self._documents.position()
        return {"position": position, "offset": self._offset}
