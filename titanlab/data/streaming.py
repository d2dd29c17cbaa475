"""A training stream that reads a fixed number of virtual streams; each packs documents into sequences."""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from titanlab.data.contract import Batch, SampleStream, State, Stream, as_saved, damaged
from titanlab.data.indexed import rank_samples
from titanlab.data.source import check_multiple

Position = dict[str, Any]


class Documents(Protocol):
    """An endless sequence of tokenised documents, with a position to resume from."""

    def position(self) -> Position:
        """The position of the next document, as JSON; `Documents` that are opened there give the same documents."""

    def next(self) -> npt.NDArray[np.uint32]:
        """The next document, uint32 `[tokens]`, with its special tokens."""

    def close(self) -> None: ...


class PackedStream:
    """Cuts concatenated documents into sequences.

    Sequence k has the tokens k·seq to (k+1)·seq of the concatenated documents. Its last token is only a label there; it
    is also the first token of the next sequence. So every token is an input exactly once.

    Args:
        offset: from a saved state: the number of tokens of the first document that were used before.

    Raises:
        DamagedPosition: the first document has no more tokens than `offset`.
    """

    def __init__(self, documents: Documents, *, seq_len: int, offset: int = 0) -> None:
        self._documents, self._seq_len = documents, seq_len
        # The position and the tokens of each document that has tokens which are not used yet.
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
        sequence = np.empty(self._seq_len + 1, dtype=np.uint32)
        filled, start = 0, self._offset
        for _, tokens in self._open:
            piece = tokens[start : start + len(sequence) - filled]
            sequence[filled : filled + len(piece)] = piece
            filled, start = filled + len(piece), 0
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

    def close(self) -> None:
        self._documents.close()

    def state(self) -> dict[str, Any]:
        """`position` of the document that contains the next token, and `offset` of the token in that document."""
        position = self._open[0][0] if self._open else self._documents.position()
        return {"position": position, "offset": self._offset}


Opener = Callable[[int, Position | None], Documents]
_POLL_SECONDS = 0.1
_Ready = tuple[Batch, State] | BaseException


class StreamingStream(SampleStream):
    """Takes sequences from V virtual streams in turn: global sample g is the next sequence of stream g % V.

    Args:
        opener: (number of a virtual stream, position or None) → the documents of that stream.
    """

    def __init__(
        self, opener: Opener, *, streams: int, fingerprint: str, seq_len: int, state: State | None, **place: int
    ) -> None:
        check_multiple("data.streams", streams, place["ranks"])
        identity = {"fingerprint": fingerprint, "seq_len": seq_len, "streams": streams}
        super().__init__(identity=identity, state=state, **place)
        parts = {} if state is None else _checked_parts(state.get("parts"), streams)
        self._count, self._seq_len = streams, seq_len
        self._streams: dict[int, PackedStream] = {}
        for number in range(self._rank, streams, self._ranks):
            part = parts.get(str(number), {"position": None, "offset": 0})
            documents = opener(number, part["position"])
            self._streams[number] = PackedStream(documents, seq_len=seq_len, offset=part["offset"])

    def next_batch(self) -> Batch:
        samples = rank_samples(self._samples, global_batch=self._global_batch, rank=self._rank, ranks=self._ranks)
        rows = np.empty((len(samples), self._seq_len + 1), dtype=np.int64)
        for row, sample in enumerate(samples):
            rows[row] = self._streams[sample % self._count].next_sequence()
        self._samples += self._global_batch
        return Batch(rows[:, :-1].copy(), rows[:, 1:].copy())

    def state(self) -> State:
        return {**super().state(), "parts": {str(number): stream.state() for number, stream in self._streams.items()}}

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()


class ReadAhead:
    """Gives the batches of another stream, which a thread prepares while the training computes.

    Args:
        stream: the other stream; from now on only the thread may use it.
        depth: the largest number of batches that wait in the queue.
    """

    def __init__(self, stream: Stream, depth: int) -> None:
        self._state = stream.state()
        self._ready: queue.Queue[_Ready] = queue.Queue(depth)
        self._stop = threading.Event()
        self._error: BaseException | None = None
        # Give the thread only the queue and the event, not this object, so that this object can be garbage-collected.
        self._thread = threading.Thread(
            target=_read_ahead, args=(stream, self._ready, self._stop), name="titanlab-data", daemon=True
        )
        # Wait for the thread also when Python exits: a thread that still runs in a library can crash the interpreter.
        self.close = weakref.finalize(self, _end, self._stop, self._thread)
        self._thread.start()

    def next_batch(self) -> Batch:
        """The next batch of the stream. If the thread met an error, raises that error."""
        if self._stop.is_set():
            raise RuntimeError("this data stream is closed")
        if self._error is None:
            ready = self._ready.get()
            if not isinstance(ready, BaseException):
                batch, self._state = ready
                return batch
            self._error = ready
        raise self._error

    def state(self) -> State:
        """The position after the batch that `next_batch` returned last, not after the batches that wait."""
        return self._state


def _checked_parts(parts: Any, streams: int) -> dict[str, Any]:
    """Check and return the states of all virtual streams, by number, as `PackedStream.state` returns them."""
    found: dict[str, Any] = as_saved("parts", parts, dict[str, dict[str, Any]])
    if found.keys() != {str(number) for number in range(streams)}:
        raise damaged("parts", parts, f"must map the numbers of all {streams} streams to their states")
    for number, part in found.items():
        as_saved(f"parts.{number}.position", part.get("position"), dict)
        as_saved(f"parts.{number}.offset", part.get("offset"), int)
    return found


def _read_ahead(stream: Stream, ready: queue.Queue[_Ready], stop: threading.Event) -> None:
    item: _Ready | None = None
    while not stop.is_set() and not isinstance(item, BaseException):
        try:
            item = stream.next_batch(), stream.state()
        # Hand on any error: `next_batch` raises it in the thread that asks for the next batch.
        except BaseException as error:
            item = error
        while not stop.is_set():
            with contextlib.suppress(queue.Full):
                ready.put(item, timeout=_POLL_SECONDS)
                break
    stream.close()


def _end(stop: threading.Event, thread: threading.Thread) -> None:
    stop.set()
    if thread is not threading.current_thread():
        thread.join(timeout=10.0)
