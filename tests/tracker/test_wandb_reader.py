"""Files of wandb: whole, of several starts, cut off, damaged, and of others."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from tests.tracker.wandb_file import BLOCK, HEADER, framed, write_run
from titanlab.errors import ConfigError
from titanlab.tracker.wandb_reader import read_file, read_runs, runs_of_project

ROWS = [{"_step": step, "_timestamp": 100.0 + step, "loss": 5.0 - step} for step in (1, 2, 3)]
CONFIG = {"seed": 0, "layout.label": "dp_s2", "model": {"dim": 64}, "attempt": 1}


@pytest.fixture
def file(tmp_path):
    return write_run(tmp_path / "run-abcd.wandb", config=CONFIG, rows=ROWS, summary={"outcome": "done", "loss": 2.0})


def test_a_whole_file(file):
    run = read_file(file)
    assert (run.id, run.name, run.group) == ("abcd1111-000001", "toy-abcd1111", "layouts")
    assert run.config == CONFIG
    assert run.rows == [{**row, "attempt": 1} for row in ROWS]
    assert run.summary == {"outcome": "done", "loss": 2.0, "_wandb": {"runtime": 1}}
    assert (run.exit_code, run.cores, run.damaged, run.path) == (0, 2, 0, file)


def test_records_that_are_longer_than_a_block(tmp_path):
    long = {"_step": 1, "text": "x" * (3 * BLOCK)}
    rows = [{"_step": 0, "text": "y" * (BLOCK - 200)}, long, {"_step": 2, "loss": 1.0}]
    run = read_file(write_run(tmp_path / "run-a.wandb", config=CONFIG, rows=rows))
    assert (run.rows, run.damaged) == ([{**row, "attempt": 1} for row in rows], 0)


@pytest.mark.parametrize("left", [0, 1, 6, 7, 8])
def test_a_block_with_little_room_at_its_end(tmp_path, left):
    """The next piece begins in the next block where fewer than 7 bytes are left, and is empty where 7 are."""

    def content(size):
        rows = [{"_step": 1, "text": "x" * size}]
        return write_run(tmp_path / "run-a.wandb", rows=rows, exit_code=None).read_bytes()

    size = BLOCK // 2
    size += BLOCK - left - len(content(size))
    assert len(content(size)) == BLOCK - left
    rows = [{"_step": 1, "text": "x" * size}, {"_step": 2, "loss": 1.0}]
    run = read_file(write_run(tmp_path / "run-a.wandb", rows=rows))
    assert (run.damaged, run.exit_code) == (0, 0)
    assert run.rows == [{**row, "attempt": 1} for row in rows]


def test_a_file_that_ends_anywhere_is_read_up_to_there(file):
    content = file.read_bytes()
    seen = set()
    for size in range(len(HEADER), len(content), 3):
        file.write_bytes(content[:size])
        run = read_file(file)
        assert (run.damaged, run.exit_code) == (0, None)
        assert run.rows == [{**row, "attempt": 1} for row in ROWS][: len(run.rows)]
        seen.add(len(run.rows))
    assert seen == {0, 1, 2, 3}


def test_a_killed_run_has_no_exit_code(tmp_path):
    run = read_file(write_run(tmp_path / "run-a.wandb", config=CONFIG, rows=ROWS, exit_code=None))
    assert (run.exit_code, len(run.rows), run.summary) == (None, 3, {})


def test_a_damaged_block_is_left_out_and_counted(tmp_path):
    rows = [{"_step": step, "text": "x" * 20_000} for step in range(6)]
    path = write_run(tmp_path / "run-a.wandb", config=CONFIG, rows=rows)
    content = bytearray(path.read_bytes())
    # A bit in the middle of the second block.
    content[BLOCK + BLOCK // 2] ^= 1
    path.write_bytes(content)
    run = read_file(path)
    steps = [row["_step"] for row in run.rows]
    assert run.damaged >= 1
    assert run.exit_code == 0
    assert steps[0] == 0
    assert steps[-1] == 5
    assert len(steps) < 6
    assert all(row["text"] == "x" * 20_000 for row in run.rows)


def test_every_changed_byte_is_seen_or_harmless(file):
    content = file.read_bytes()
    whole = read_file(file)
    for place in range(len(HEADER), len(content), 7):
        file.write_bytes(content[:place] + bytes([content[place] ^ 0x41]) + content[place + 1 :])
        run = read_file(file)
        # All is in one block: the rest of it is lost, and nothing wrong is read.
        assert run.damaged == 1 or run.exit_code is None
        assert list(run.rows) == list(whole.rows)[: len(run.rows)]


def test_zeros_at_the_end_are_no_record(file):
    file.write_bytes(file.read_bytes() + bytes(500))
    run = read_file(file)
    assert (run.exit_code, len(run.rows)) == (0, 3)


def test_values_that_are_no_json_are_left_out(tmp_path):
    from wandb.proto.wandb_internal_pb2 import Record

    record = Record()
    record.history.step.num = 4
    for key, text in {"good": "1.5", "bad": "{", "deep": "[" * 100_000, "nan": "NaN"}.items():
        record.history.item.add(key=key, value_json=text)
    path = tmp_path / "run-zzzz.wandb"
    path.write_bytes(framed([record.SerializeToString()]))
    run = read_file(path)
    # Without a record of the run, the file's name has the id.
    assert run.id == "zzzz"
    (row,) = run.rows
    assert {**row, "nan": None} == {"good": 1.5, "nan": None, "_step": 4, "attempt": 1}


def test_starts_of_one_run_are_joined_and_later_rows_count(tmp_path):
    wandb = tmp_path / "runs" / "layouts" / "toy-abcd1111" / "wandb"
    later = [{"_step": step, "loss": 10.0 * step} for step in (3, 4)]
    write_run(
        wandb / "offline-run-20260102_000000-abcd" / "run-abcd.wandb",
        config={**CONFIG, "attempt": 2},
        rows=later,
        summary={"outcome": "done"},
    )
    first = [*ROWS, {"_step": 4, "loss": 0.5}, {"_step": 5, "loss": 0.1}]
    write_run(wandb / "run-20260101_000000-abcd" / "run-abcd.wandb", config=CONFIG, rows=first, exit_code=None)
    write_run(tmp_path / "runs" / "layouts" / "toy-abcd1111" / "replaced" / "wandb" / "r" / "run-old.wandb", id="old")
    (run,) = read_runs(tmp_path / "runs")
    assert [(row["_step"], row["attempt"]) for row in run.rows] == [(1, 1), (2, 1), (3, 2), (4, 2)]
    assert [row["loss"] for row in run.rows][2:] == [30.0, 40.0]
    assert (run.exit_code, run.config["attempt"]) == (0, 2)
    # One file is read alone.
    assert len(read_runs(wandb / "run-20260101_000000-abcd" / "run-abcd.wandb")[0].rows) == 5


def test_what_is_no_file_of_wandb_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="has no file of wandb below it; train with tracker=wandb"):
        read_runs(tmp_path)
    for content in (b"", b":W&", b"\0" * 100, b":W&B\xe1\xbe\x07" + b"x" * 10):
        (tmp_path / "run-a.wandb").write_bytes(content)
        with pytest.raises(ConfigError, match="is no file of wandb"):
            read_runs(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_file(tmp_path / "run-gone.wandb")
    os.mkfifo(tmp_path / "run-pipe.wandb")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_file(tmp_path / "run-pipe.wandb")


def test_runs_of_a_project_on_a_server():
    asked = []

    class Run(SimpleNamespace):
        def scan_history(self):
            return iter(ROWS)

    def runs(project, filters):
        asked.append((project, filters))
        known = {"id": "x", "name": "toy-abcd1111", "group": "layouts", "config": CONFIG, "summary": {"loss": 2.0}}
        return [Run(**known, state="finished"), Run(**{**known, "group": None}, state="running")]

    first, second = runs_of_project("us/titanlab", "layouts", api=SimpleNamespace(runs=runs))
    assert asked == [("us/titanlab", {"group": "layouts"})]
    assert first.rows == [{**row, "attempt": 1} for row in ROWS]
    assert (first.exit_code, second.exit_code, second.group, first.path) == (0, None, "", None)
