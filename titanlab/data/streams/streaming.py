"""The stream over a fixed number of virtual streams, of which each rank opens only its own."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from titanlab.data.rules import check_streams
from titanlab.data.streams.indexed import rank_samples
from titanlab.data.streams.packing import Documents, PackedStream, Position
from titanlab.data.streams.stream import Batch, State, Stream, check_state

Opener = Callable[[int, Position | None], Documents]
_POLL_SECONDS = 0.1
_Ready = tuple[Batch, State] | BaseException


class StreamingStream:
    """Sequences of V virtual streams in turn: global sample g is the next of stream g % V.

    Args:
        opener: (number of a virtual stream, position or None) → its documents.
        streams: V; a multiple of `ranks`.
        fingerprint: of the data, kept in the state.
        global_batch: sequences of one step, over all ranks.
        rank, ranks: this data-parallel rank, and how many there are; they divide `global_batch`.
        state: a merged state to resume from, of any number of ranks and any global batch.
    """

    def __init__(
        self,
        opener: Opener,
        *,
        streams: int,
        fingerprint: str,
        seq_len: int,
        global_batch: int,
        rank: int,
        ranks: int,
        state: State | None,
    ) -> None:
        check_streams(streams, ranks)
        self._facts = {"fingerprint": fingerprint, "seq_len": seq_len, "streams": streams}
        self._samples = 0
        parts: dict[str, Any] = {}
        if state is not None:
            check_state(state, **self._facts)
            self._samples, parts = int(state["samples"]), state["parts"]
            if len(parts) != streams:
                raise ValueError(f"the state has {len(parts)} of {streams} streams: merge those of all ranks")
        self._count = streams
        self._streams: dict[int, PackedStream] = {}
        for number in range(rank, streams, ranks):
            part = parts.get(str(number), {"position": None, "offset": 0})
            documents = opener(number, part["position"])
            self._streams[number] = PackedStream(documents, seq_len=seq_len, offset=part["offset"])
        self._seq_len, self._global_batch, self._rank, self._ranks = seq_len, global_batch, rank, ranks

    def next_batch(self) -> Batch:
        """This rank's sequences of the next step, int64 `[global_batch / ranks, seq]`."""
        mine = rank_samples(self._samples, global_batch=self._global_batch, rank=self._rank, ranks=self._ranks)
        rows = np.empty((len(mine), self._seq_len + 1), dtype=np.int64)
        for row, sample in enumerate(mine):
            rows[row] = self._streams[sample % self._count].next_sequence()
        self._samples += self._global_batch
        return Batch(rows[:, :-1].copy(), rows[:, 1:].copy())

    def state(self) -> State:
        """Samples that all ranks together have taken, and where this rank's streams stand."""
        parts = {str(number): stream.state() for number, stream in self._streams.items()}
        return {**self._facts, "samples": self._samples, "parts": parts}

    def close(self) -> None:
        """Let go of what the streams are read from."""
        for stream in self._streams.values():
            stream.close()


class ReadAhead:
    """Another stream's batches, prepared by a thread while the trainer computes.

    Args:
        stream: used by the thread alone from now on.
        depth: batches that wait at most.
    """

    def __init__(self, stream: Stream, depth: int) -> None:
        self._state = stream.state()
        self._ready: queue.Queue[_Ready] = queue.Queue(depth)
        self._stop = threading.Event()
        self._error: BaseException | None = None
        # The thread knows no more of this object than these two, so that it can be collected.
        self._thread = threading.Thread(
            target=_read_ahead, args=(stream, self._ready, self._stop), name="titanlab-data", daemon=True
        )
        # A thread inside a library while the interpreter ends can crash it, so exit waits for it too.
        self.close = weakref.finalize(self, _end, self._stop, self._thread)
        self._thread.start()

    def next_batch(self) -> Batch:
        """The next batch of the stream. Raises what the thread met."""
        if self._stop.is_set():
            raise RuntimeError("this data stream is closed")
        if self._error is None:
            found = self._ready.get()
            if not isinstance(found, BaseException):
                batch, self._state = found
                return batch
            self._error = found
        raise self._error

    def state(self) -> State:
        """The position after the batch that was given last, not after those that wait."""
        return self._state


def _read_ahead(stream: Stream, ready: queue.Queue[_Ready], stop: threading.Event) -> None:
    try:
        while not stop.is_set():
            _put((stream.next_batch(), stream.state()), ready, stop)
    # Whatever it is, it belongs to whoever asks for the next batch.
    except BaseException as error:
        _put(error, ready, stop)
    finally:
        stream.close()


def _put(
    found: _Ready,
    ready: queue.Queue[_Ready],
    stop: threading.Event,
) -> None:
    while not stop.is_set():
        try:
            ready.put(found, timeout=_POLL_SECONDS)
            return
        except queue.Full:
            continue


def _end(stop: threading.Event, thread: threading.Thread) -> None:
    stop.set()
    if thread is not threading.current_thread():
        thread.join(timeout=10.0)
