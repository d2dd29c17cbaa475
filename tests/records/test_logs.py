"""Logs of a run: whose they are, their lines from either end, and their order by time."""

import json
import os
from datetime import datetime

import pytest

from titanlab.errors import ConfigError
from titanlab.records import (
    Growing,
    RunFolder,
    backward,
    forward,
    log_parts,
    logs,
    part_of,
    rank_log,
    timed,
    timed_from_end,
)
from titanlab.records.logs import moment
from titanlab.system import open_to_read


@pytest.fixture
def run(tmp_path):
    (tmp_path / "logs").mkdir()
    return RunFolder(tmp_path)


def log(run, rank, content):
    path = rank_log(run, rank)
    path.write_bytes(content)
    os.utime(path, (50, 50))
    return path


def attempt(run, number, *, time=None, marks=None):
    """An attempt that began at a time, when logs had these sizes; None: not recorded."""
    folder = run.attempt_folder(number)
    folder.mkdir(parents=True)
    if time is not None:
        (folder / "env.json").write_text(json.dumps({"time": time}))
    if marks is not None:
        (folder / "logs.json").write_text(json.dumps({"schema": 1, "bytes": marks}))


NONE = object()


@pytest.mark.parametrize(
    ("size", "marks", "parts"),
    [
        # By attempt: the sizes of logs when it began; then start, end, begin and last moment of each part.
        (30, [{}, {"0": 12}, {"0": 12, "1": 99}], [(0, 12, 10, 20), (12, 12, 20, 30), (12, 30, 30, 50)]),
        # What an attempt without marks wrote belongs to the one before.
        (30, [{}, NONE, {"0": 20}], [(0, 20, 10, 30), (20, 30, 30, 50)]),
        (30, [NONE, NONE], [(0, 30, 20, 50)]),
        (9, [], [(0, 9, 0, 50)]),
        # A log that was cut short since belongs to the last attempt.
        (5, [{}, {"0": 12}], [(0, 5, 20, 50)]),
        *((9, [{}, damaged], [(0, 9, 10, 50)]) for damaged in ([], "x", {"0": -1}, {"0": "5"}, {"0": None})),
    ],
)
def test_a_log_is_divided_among_the_attempts(run, size, marks, parts):
    path = log(run, 0, b"x" * size)
    for number, mark in enumerate(marks, 1):
        attempt(run, number, time=10 * number, marks=None if mark is NONE else mark)
    found = log_parts(run, 0, path)
    assert [(part.start, part.end, part.begin, part.last) for part in found] == parts
    for part in found:
        assert part_of(run, 0, path, part.attempt) == part
    for number in set(run.attempts()) - {part.attempt for part in found}:
        rule = "where it begins in the logs is not known; leave --attempt out"
        with pytest.raises(ConfigError, match=f"^--attempt={number}: {rule}$"):
            part_of(run, 0, path, number)


@pytest.mark.parametrize(
    ("time", "expected"),
    [(None, 7.0), ("x", 7.0), (-1, 0.0), (10**1000, 7.0), (4e9, 0.0), (True, 1.0), (float("nan"), 0.0)],
)
def test_a_time_that_no_attempt_has_is_not_taken(run, time, expected):
    path = log(run, 0, b"")
    content = {"schema": 1, "sha256": "ab", "content": {}, "created": 7}
    (run.path / "identity.json").write_text(json.dumps(content))
    attempt(run, 1, time=time, marks={})
    assert log_parts(run, 0, path)[0].begin == expected


def whole(path):
    return path, 0, path.stat().st_size


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b"\n\n",
        b"a",
        b"a\n",
        b"a\nb",
        b"\na\n\nb\n",
        b"x" * 50 + b"\n" + b"y" * 7 + b"\n",
        b"\xff\x00\n\xfe",
    ],
)
def test_backward_gives_the_lines_of_forward_in_reverse(tmp_path, monkeypatch, content):
    monkeypatch.setattr(logs, "_BLOCK_BYTES", 8)
    path = tmp_path / "log"
    path.write_bytes(content)
    expected = content.removesuffix(b"\n").split(b"\n") if content else []
    assert list(forward(*whole(path))) == expected
    assert list(backward(*whole(path))) == expected[::-1]


def test_the_end_of_a_huge_file_is_read_without_the_rest(tmp_path):
    path = tmp_path / "log"
    with path.open("wb") as file:
        file.truncate(1 << 40)
        file.seek(0, os.SEEK_END)
        file.write(b"\nlast but one\nlast\n")
    found = backward(*whole(path))
    assert [next(found), next(found)] == [b"last", b"last but one"]


def test_a_line_without_end_is_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "MOST_LINE_BYTES", 10)
    monkeypatch.setattr(logs, "_BLOCK_BYTES", 4)
    path = tmp_path / "log"
    path.write_bytes(b"x" * 35)
    for found in (list(forward(*whole(path))), list(backward(*whole(path))), Growing(path).read(last=True)):
        assert max(map(len, found)) <= 16
        assert b"".join(found) == b"x" * 35


def test_what_is_no_file_is_refused_and_what_is_missing_is_empty(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="is no regular file"):
        open_to_read(tmp_path / "pipe")
    for name in ("pipe", "missing"):
        assert list(forward(tmp_path / name, 0, 9)) == []
        assert list(backward(tmp_path / name, 0, 9)) == []
        assert Growing(tmp_path / name).read(last=True) == []


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
    assert [line.time for line in timed(texts, 0, begin=MIDNIGHT - 2, last=MIDNIGHT + 9)] == expected
    assert [line.time for line in timed_from_end(texts, 0, last=MIDNIGHT + 9)] == expected


def test_a_clock_that_is_set_back_keeps_the_order_of_a_file():
    texts = [b"12:00:05 a", b"12:00:01 b", b"12:00:06 c"]
    for found in (timed(texts, 0, begin=NOON, last=NOON + 9), timed_from_end(texts, 0, last=NOON + 9)):
        lines = list(found)
        assert [line.text for line in lines] == texts
        assert lines == sorted(lines, key=lambda line: line.time)
