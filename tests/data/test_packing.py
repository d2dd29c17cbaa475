"""Virtual streams: no token lost or given twice, one order for any ranks, and any place to resume from."""

from __future__ import annotations

import json

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from titanlab.data.streaming import PackedStream, Position

SEQ = 5
LENGTHS = st.lists(st.integers(1, 25), min_size=1, max_size=8)


class Counted:
    """Documents of given lengths, over and over; each token is its place in its stream, plus the stream's number."""

    def __init__(self, lengths: list[int], number: int = 0, position: Position | None = None) -> None:
        self.lengths, self.base = lengths, 1_000_000 * number
        self.document, self.token = (0, 0) if position is None else (position["document"], position["token"])
        self.closed = False

    def position(self) -> Position:
        return {"document": self.document, "token": self.token}

    def next(self) -> npt.NDArray[np.uint32]:
        length = self.lengths[self.document % len(self.lengths)]
        found = np.arange(self.base + self.token, self.base + self.token + length, dtype=np.uint32)
        self.document, self.token = self.document + 1, self.token + length
        return found

    def close(self) -> None:
        self.closed = True


@given(lengths=LENGTHS, seq_len=st.integers(1, 40), count=st.integers(1, 12))
def test_no_token_is_lost_or_given_twice(lengths: list[int], seq_len: int, count: int) -> None:
    stream = PackedStream(Counted(lengths), seq_len=seq_len)
    for k in range(count):
        assert stream.next_sequence().tolist() == list(range(k * seq_len, (k + 1) * seq_len + 1))


@given(lengths=LENGTHS, seq_len=st.integers(1, 40), stops=st.lists(st.integers(0, 5), max_size=4))
def test_packing_resumes_anywhere(lengths: list[int], seq_len: int, stops: list[int]) -> None:
    stream = PackedStream(Counted(lengths), seq_len=seq_len)
    k = 0
    for stop in [*stops, 3]:
        for _ in range(stop):
            assert int(stream.next_sequence()[0]) == k * seq_len
            k += 1
        state = json.loads(json.dumps(stream.state()))
        stream = PackedStream(Counted(lengths, 0, state["position"]), seq_len=seq_len, offset=state["offset"])
        assert stream.state() == state
