"""One virtual stream: documents, packed into sequences, from any position on."""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Position = dict[str, Any]


class Documents(Protocol):
    """An endless sequence of tokenised documents that can say where it is."""

    def position(self) -> Position:
        """Where `next` stands, as JSON; documents opened at it give the same from there on."""
        ...

    def next(self) -> npt.NDArray[np.uint32]:
        """The next document, uint32 `[tokens]`, with its special tokens."""
        ...

    def close(self) -> None:
        """Let go of what they are read from."""
        ...


class PackedStream:
    """Sequences of an endless sequence of documents.

    Sequence k covers tokens [k·seq, (k+1)·seq] of the documents laid end to end; its last token is a label
    only, and the first of the next sequence. No token is lost or given twice.

    Args:
        documents: opened at the position of a state, or at the beginning.
        seq_len: tokens of a sequence.
        offset: tokens of the first document that are past; from a state.
    """

    def __init__(self, documents: Documents, *, seq_len: int, offset: int = 0) -> None:
        self._documents, self._seq_len = documents, seq_len
        # Documents with tokens that are still to come, and where each began.
        self._open: deque[tuple[Position, npt.NDArray[np.uint32]]] = deque()
        self._offset = offset
        self._ready = -offset

    def next_sequence(self) -> npt.NDArray[np.uint32]:
        """The next sequence and the label after its last token, uint32 `[seq + 1]`."""
        while self._ready < self._seq_len + 1:
            position = self._documents.position()
            tokens = self._documents.next()
            self._open.append((position, tokens))
            self._ready += len(tokens)
        found = self._first(self._seq_len + 1)
        self._offset += self._seq_len
        self._ready -= self._seq_len
        while self._offset >= len(self._open[0][1]):
            self._offset -= len(self._open.popleft()[1])
        return found

    def _first(self, count: int) -> npt.NDArray[np.uint32]:
        found = np.empty(count, dtype=np.uint32)
        filled, start = 0, self._offset
        for _, tokens in self._open:
            piece = tokens[start : start + count - filled]
            found[filled : filled + len(piece)] = piece
            filled, start = filled + len(piece), 0
        return found

    def close(self) -> None:
        """Let go of what the documents are read from."""
        self._documents.close()

    def state(self) -> dict[str, Any]:
        """`position` of the document with the next token, and `offset` of the token in it."""
        position = self._open[0][0] if self._open else self._documents.position()
        return {"position": position, "offset": self._offset}
