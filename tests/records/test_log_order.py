"""Lines of several ranks are ordered by the times of day that some of them have."""

from datetime import datetime

import pytest

from titanlab.records import merged, timed, timed_from_end
from titanlab.records.logs import moment

NOON = datetime(2026, 3, 1, 12, 0, 0).timestamp()
MIDNIGHT = datetime(2026, 3, 2, 0, 0, 0).timestamp()


@pytest.mark.parametrize(
    "text",
    [
        b"12:00:05  step 1",
        b"2026-03-01 12:00:05,123 INFO",
        b"[2026-03-01T12:00:05",
        b"W0301 12:00:05.123 42 file.py:1]",
        b"[rank3]:W0301 12:00:05.123",
        b"[rank3]:[W301 no, but W0301 12:00:05",
    ],
)
def test_the_time_of_a_line(text):
    expected = None if b"no, but" in text else NOON + 5
    assert moment(text, NOON) == expected


@pytest.mark.parametrize("text", [b"", b"99:00:05", b"12:00:055", b"loss 12:00:05", b"\xff12:00:05"])
def test_a_line_without_a_time(text):
    assert moment(text, NOON) is None


def test_times_go_on_after_midnight():
    texts = [b"23:59:59 a", b"b", b"00:00:01 c"]
    expected = [MIDNIGHT - 1, MIDNIGHT - 1, MIDNIGHT + 1]
    assert [line.time for line in timed(texts, 0, begin=MIDNIGHT - 2, end=MIDNIGHT + 9)] == expected
    assert [line.time for line in timed_from_end(texts, 0, end=MIDNIGHT + 9)] == expected


def test_a_clock_that_is_set_back_keeps_the_order_of_a_file():
    texts = [b"12:00:05 a", b"12:00:01 b", b"12:00:06 c"]
    for found in (timed(texts, 0, begin=NOON, end=NOON + 9), timed_from_end(texts, 0, end=NOON + 9)):
        lines = list(found)
        assert [line.text for line in lines] == texts
        assert lines == sorted(lines, key=lambda line: line.time)


def test_ranks_are_merged_and_a_rank_without_times_comes_at_the_end():
    zero = timed([b"12:00:01 a", b"12:00:05 c"], 0, begin=NOON, end=NOON + 5)
    one = timed([b"Traceback", b"  error"], 1, begin=NOON, end=NOON + 6)
    two = timed([b"12:00:03 b"], 2, begin=NOON, end=NOON + 3)
    found = [(line.rank, line.text) for line in merged([zero, one, two])]
    expected = [(0, b"12:00:01 a"), (2, b"12:00:03 b"), (0, b"12:00:05 c"), (1, b"Traceback"), (1, b"  error")]
    assert found == expected
