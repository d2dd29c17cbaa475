"""Virtual streams: no token lost or given twice, one order for any ranks, read ahead or not, and any place to resume from."""

from __future__ import annotations

import gc
import json
import threading
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from titanlab.data.contract import merge_states
from titanlab.data.streaming import PackedStream, ReadAhead, StreamingStream
from titanlab.errors import ConfigError

SEQ = 5
LENGTHS = st.lists(st.integers(1, 25), min_size=1, max_size=8)


class Counted:
    """Documents of given lengths, over and over; each token is its place in its stream, plus the stream's number."""

    def __init__(self, lengths, number=0, position=None):
        self.lengths, self.base = lengths, 1_000_000 * number
        self.document, self.token = (0, 0) if position is None else (position["document"], position["token"])
        self.closed = False

    def position(self):
        return {"document": self.document, "token": self.token}

    def next(self):
        length = self.lengths[self.document % len(self.lengths)]
        found = np.arange(self.base + self.token, self.base + self.token + length, dtype=np.uint32)
        self.document, self.token = self.document + 1, self.token + length
        return found

    def close(self):
        self.closed = True


@given(lengths=LENGTHS, seq_len=st.integers(1, 40), count=st.integers(1, 12))
def test_no_token_is_lost_or_given_twice(lengths, seq_len, count):
    stream = PackedStream(Counted(lengths), seq_len=seq_len)
    for k in range(count):
        assert stream.next_sequence().tolist() == list(range(k * seq_len, (k + 1) * seq_len + 1))


@given(lengths=LENGTHS, seq_len=st.integers(1, 40), stops=st.lists(st.integers(0, 5), max_size=4))
def test_packing_resumes_anywhere(lengths, seq_len, stops):
    stream = PackedStream(Counted(lengths), seq_len=seq_len)
    k = 0
    for stop in [*stops, 3]:
        for _ in range(stop):
            assert int(stream.next_sequence()[0]) == k * seq_len
            k += 1
        state = json.loads(json.dumps(stream.state()))
        stream = PackedStream(Counted(lengths, 0, state["position"]), seq_len=seq_len, offset=state["offset"])
        assert stream.state() == state


def opener(lengths):
    return lambda number, position: Counted([*lengths[number % len(lengths) :], *lengths], number, position)


def global_order(lengths, *, ranks, steps, batch=12, ahead=0, state=None):
    """Each global batch in the global order, and the merged state after them."""
    streams = []
    for rank in range(ranks):
        plain = StreamingStream(
            opener(lengths), streams=12, fingerprint="f", seq_len=SEQ, global_batch=batch, rank=rank, ranks=ranks, state=state
        )  # fmt: skip
        streams.append(ReadAhead(plain, ahead) if ahead else plain)
    start = 0 if state is None else state["samples"]
    found = []
    for step in range(steps):
        rows = {}
        for rank, stream in enumerate(streams):
            mine = [g for g in range(start + step * batch, start + (step + 1) * batch) if g % ranks == rank]
            batches = stream.next_batch()
            assert batches.tokens.shape == batches.labels.shape == (batch // ranks, SEQ)
            assert batches.tokens.dtype == batches.labels.dtype == np.int64
            rows |= dict(zip(mine, zip(batches.tokens.tolist(), batches.labels.tolist(), strict=True), strict=True))
        found.append([rows[g] for g in sorted(rows)])
    merged = merge_states([json.loads(json.dumps(stream.state())) for stream in streams])
    for stream in streams:
        stream.close()
    return found, merged


@given(lengths=LENGTHS, ranks=st.sampled_from([2, 3, 4, 6]))
def test_order_is_the_same_for_any_number_of_ranks(lengths, ranks):
    alone, one = global_order(lengths, ranks=1, steps=4)
    together, many = global_order(lengths, ranks=ranks, steps=4)
    assert together == alone
    assert many == one
    # Sample g is the next sequence of stream g % 12.
    for g, (tokens, labels) in enumerate(row for step in alone for row in step):
        first = 1_000_000 * (g % 12) + g // 12 * SEQ
        assert tokens == list(range(first, first + SEQ))
        assert labels == list(range(first + 1, first + SEQ + 1))


@given(
    lengths=LENGTHS,
    before=st.sampled_from([1, 2, 3, 4]),
    after=st.sampled_from([1, 2, 3, 4]),
    stop=st.integers(0, 4),
    batch=st.sampled_from([12, 24, 36]),
)
def test_resumes_at_any_step_with_any_number_of_ranks(lengths, before, after, stop, batch):
    whole, end = global_order(lengths, ranks=1, steps=5, batch=batch)
    first, state = global_order(lengths, ranks=before, steps=stop, batch=batch)
    second, same_end = global_order(lengths, ranks=after, steps=5 - stop, batch=batch, state=state)
    assert first + second == whole
    assert same_end == end


def made(documents, ahead=2):
    plain = StreamingStream(
        lambda number, position: documents, streams=1, fingerprint="f", seq_len=SEQ, global_batch=1, rank=0, ranks=1, state=None
    )  # fmt: skip
    return ReadAhead(plain, ahead)


def readers():
    return sum(thread.name == "titanlab-data" for thread in threading.enumerate())


def test_close_ends_the_thread_and_lets_go_of_the_documents():
    documents = Counted([7])
    stream = made(documents)
    stream.next_batch()
    stream.close()
    stream.close()
    assert documents.closed
    assert readers() == 0
    with pytest.raises(RuntimeError, match="closed"):
        stream.next_batch()


def test_a_forgotten_stream_ends_its_thread():
    documents = Counted([7])
    stream = made(documents)
    gone = weakref.ref(stream)
    del stream
    gc.collect()
    assert gone() is None
    assert documents.closed
    assert readers() == 0


def test_an_error_while_reading_ahead_reaches_whoever_asks():
    class Failing(Counted):
        def next(self):
            if self.document == 3:
                raise ConfigError("data.path", "x", "broke", "mend it")
            return super().next()

    stream = made(Failing([SEQ]))
    assert stream.next_batch().tokens.tolist() == [list(range(SEQ))]
    for _ in range(3):
        with pytest.raises(ConfigError, match="broke"):
            for _ in range(5):
                stream.next_batch()
    stream.close()


def test_labels_that_are_changed_change_no_token():
    alone = {"streams": 1, "fingerprint": "f", "seq_len": SEQ, "global_batch": 2, "rank": 0, "ranks": 1, "state": None}
    tokens, labels = StreamingStream(opener([9]), **alone).next_batch()
    before = tokens.copy()
    labels.fill(-100)
    assert np.array_equal(tokens, before)
