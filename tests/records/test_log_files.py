"""Logs of a run: which rank wrote which file, and which part of it belongs to which attempt."""

from __future__ import annotations

import json
import os

import pytest

from titanlab.errors import ConfigError
from titanlab.records import RunFolder, log_parts, part_of, rank_log, rank_logs
from titanlab.records.logs import write_marks


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


def spans(found):
    return [(part.span.start, part.span.end, part.begin, part.end) for part in found]


def test_logs_are_those_with_the_name_of_a_rank(run):
    for name in ("rank-10.log", "rank-2.log", "rank-0.log", "rank-x.log", "rank-1.log.gz", "rank-1234567.log", "a"):
        (run.logs / name).write_text("")
    assert {rank: path.name for rank, path in rank_logs(run).items()} == {
        0: "rank-0.log", 2: "rank-2.log", 10: "rank-10.log",
    }  # fmt: skip
    assert list(rank_logs(run)) == [0, 2, 10]
    assert rank_log(run, 7) == run.logs / "rank-7.log"


def test_a_run_without_logs_has_none(tmp_path):
    assert rank_logs(RunFolder(tmp_path)) == {}


def test_the_sizes_are_noted_before_an_attempt(run):
    log(run, 0, b"12345")
    log(run, 1, b"")
    run.attempt_folder(2).mkdir(parents=True)
    write_marks(run, 2)
    assert json.loads((run.attempt_folder(2) / "logs.json").read_text()) == {"schema": 1, "bytes": {"0": 5}}


def test_a_log_is_divided_among_the_attempts(run):
    path = log(run, 0, b"x" * 30)
    attempt(run, 1, time=10, marks={})
    attempt(run, 2, time=20, marks={"0": 12})
    attempt(run, 3, time=30, marks={"0": 12, "1": 99})
    assert spans(log_parts(run, 0, path)) == [(0, 12, 10.0, 20.0), (12, 12, 20.0, 30.0), (12, 30, 30.0, 50.0)]
    assert [part.rank for part in log_parts(run, 0, path)] == [0] * 3
    for number, expected in ((1, (0, 12)), (2, (12, 12)), (3, (12, 30))):
        span = part_of(run, 0, path, number).span
        assert (span.start, span.end, span.path) == (*expected, path)


def test_a_log_of_an_earlier_version_is_one_part(run):
    path = log(run, 0, b"x" * 9)
    assert spans(log_parts(run, 0, path)) == [(0, 9, 0.0, 50.0)]
    attempt(run, 1, time=10)
    assert spans(log_parts(run, 0, path)) == [(0, 9, 10.0, 50.0)]
    assert part_of(run, 0, path, 1).span.end == 9


def test_an_attempt_without_marks_belongs_to_the_one_before(run):
    path = log(run, 0, b"x" * 30)
    attempt(run, 1, time=10, marks={})
    attempt(run, 2, time=20)
    attempt(run, 3, time=30, marks={"0": 20})
    assert spans(log_parts(run, 0, path)) == [(0, 20, 10.0, 30.0), (20, 30, 30.0, 50.0)]
    with pytest.raises(
        ConfigError, match=r"^--attempt=2: where it begins in the logs is not known; leave --attempt out$"
    ):
        part_of(run, 0, path, 2)


def test_without_marks_all_belongs_to_the_newest_attempt(run):
    path = log(run, 0, b"x" * 30)
    attempt(run, 1)
    attempt(run, 2)
    with pytest.raises(ConfigError, match="where it begins in the logs is not known"):
        part_of(run, 0, path, 1)
    assert (part_of(run, 0, path, 2).span.start, part_of(run, 0, path, 2).span.end) == (0, 30)


def test_a_log_that_was_cut_short_since_belongs_to_the_last(run):
    path = log(run, 0, b"x" * 5)
    attempt(run, 1, time=10, marks={})
    attempt(run, 2, time=20, marks={"0": 12})
    assert spans(log_parts(run, 0, path)) == [(0, 5, 20.0, 50.0)]
    assert (part_of(run, 0, path, 2).span.start, part_of(run, 0, path, 2).span.end) == (0, 5)


def test_a_missing_log_has_an_empty_part(run):
    path = rank_log(run, 0)
    attempt(run, 1, time=10, marks={})
    assert spans(log_parts(run, 0, path)) == [(0, 0, 10.0, 0.0)]


@pytest.mark.parametrize("marks", [[], "x", {"0": -1}, {"0": "5"}, {"0": None}])
def test_damaged_marks_are_none(run, marks):
    path = log(run, 0, b"x" * 9)
    attempt(run, 1, time=10, marks={})
    attempt(run, 2, time=20, marks=marks)
    assert spans(log_parts(run, 0, path)) == [(0, 9, 10.0, 50.0)]


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
