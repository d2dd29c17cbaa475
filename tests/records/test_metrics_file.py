"""metrics.jsonl: torn lines, attempts that supersede, rows that round-trip."""

import os
from unittest import mock

import hypothesis.strategies as st
from hypothesis import given

from titanlab.records.run_folder import MetricsWriter, read_metrics


def write(path, attempt, resumed_step, steps, kind="train"):
    with MetricsWriter(path, attempt=attempt, resumed_step=resumed_step, clock=lambda: 1000.0 + attempt) as writer:
        for step in steps:
            writer.write(kind, step, {"loss": step + attempt / 10})


def test_rows_round_trip_exactly(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path, attempt=1, clock=lambda: 5.0) as writer:
        writer.write("train", 1, {"loss_metrics/global_avg_loss": 0.1 + 0.2, "mfu(%)": None, "lr": float("inf")})
        writer.write("validation", 1, {"validation_metrics/loss": 1e-300})
    assert read_metrics(path, "train") == [
        {
            "kind": "train",
            "step": 1,
            "attempt": 1,
            "time": 5.0,
            "loss_metrics/global_avg_loss": 0.1 + 0.2,
            "mfu(%)": None,
            "lr": None,
        }
    ]
    assert [row["kind"] for row in read_metrics(path)] == ["train", "validation"]
    assert [row["kind"] for row in read_metrics(path, "attempt")] == ["attempt"]


def test_the_rows_of_an_attempt_that_was_rolled_back_do_not_count(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 0, [10, 20, 30, 40, 50])
    # Resumed at 20, and ended before it came to where the first attempt had been.
    write(path, 2, 20, [30])
    assert [(row["step"], row["attempt"]) for row in read_metrics(path)] == [(10, 1), (20, 1), (30, 2)]
    # Kinds are superseded alike, and counted apart.
    write(path, 3, 20, [], kind="validation")
    write(path, 3, 20, [21], kind="validation")
    assert [(row["step"], row["attempt"], row["kind"]) for row in read_metrics(path)] == [
        (10, 1, "train"),
        (20, 1, "train"),
        (21, 3, "validation"),
    ]
    write(path, 4, 0, [])
    assert read_metrics(path) == read_metrics(tmp_path / "none.jsonl") == []


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=5))
def test_reading_gives_the_history_of_the_last_attempt(tmp_path_factory, attempts):
    path = tmp_path_factory.mktemp("runs") / "metrics.jsonl"
    expected: dict[int, int] = {}
    reached = 0
    for number, (resumed, length) in enumerate(attempts, start=1):
        resumed = min(resumed, reached)  # There is no checkpoint beyond what was reached.
        reached = resumed + length
        write(path, number, resumed, range(resumed + 1, reached + 1))
        expected = {step: attempt for step, attempt in expected.items() if step <= resumed}
        expected |= dict.fromkeys(range(resumed + 1, reached + 1), number)
    assert {row["step"]: row["attempt"] for row in read_metrics(path)} == expected
    assert [row["step"] for row in read_metrics(path)] == sorted(expected)


@given(st.data())
def test_a_file_cut_anywhere_loses_at_most_its_last_row(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("runs") / "metrics.jsonl"
    write(path, 1, 0, range(1, 6))
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    complete = whole[:cut].count(b"\n") + (cut < len(whole) and whole[cut : cut + 1] == b"\n")
    assert len(read_metrics(path)) == max(0, complete - 1)
    # What the next attempt adds does not become part of the torn line.
    resumed = max(0, complete - 1)
    write(path, 2, resumed, range(resumed + 1, 6))
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3, 4, 5]
    assert len(read_metrics(path, "attempt")) == 1 + (complete > 0)


def test_foreign_and_damaged_lines_are_passed_over(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 0, [1])
    with path.open("ab") as file:
        file.write(b'\n[]\nnull\n{"kind": "train"}\n{"kind": "train", "step": "2", "attempt": 1}\n\xff\xfe\n\0\0\0\n')
    assert [row["step"] for row in read_metrics(path)] == [1]


def test_a_row_is_one_write_to_the_end(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path, attempt=1) as writer, mock.patch("os.write", side_effect=os.write) as write_call:
        writer.write("train", 1, {"text": "é" * 10_000})
        assert write_call.call_count == 1
    assert read_metrics(path)[0]["text"] == "é" * 10_000
