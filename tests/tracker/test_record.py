"""The record of a tracker: what is written is read, and a damaged one counts as none."""

from __future__ import annotations

import json

import pytest

from titanlab.techniques.tracker.contract import (
    OPEN,
    RECORD_FILE,
    Record,
    file_of,
    read_record,
    records_in,
    write_record,
)

WHOLE = {"schema": 1, "kind": "wandb", "state": "open", "step": 5, "rows": 5, "folder": "wandb/run-1"}


def test_what_is_written_is_read(tmp_path):
    record = Record(kind="wandb", state=OPEN, wanted="online", mode="offline", folder="wandb/x", step=3, rows=2)
    write_record(tmp_path / RECORD_FILE, record)
    found = read_record(tmp_path / RECORD_FILE)
    assert found is not None
    assert found.updated >= record.updated
    assert {**vars(found), "updated": 0} == {**vars(record), "updated": 0}


def test_each_tracker_has_its_own(tmp_path):
    for kind in ("wandb", "tensorboard"):
        write_record(tmp_path / file_of(kind), Record(kind=kind))
    (tmp_path / "tracker-broken.json").write_text("{")
    assert sorted(records_in(tmp_path)) == ["tensorboard", "wandb"]
    assert records_in(tmp_path / "none") == {}


def test_a_full_disk_stops_nothing(tmp_path):
    write_record(tmp_path / "missing" / RECORD_FILE, Record(kind="wandb"))
    assert read_record(tmp_path / "missing" / RECORD_FILE) is None


def test_fields_of_a_later_version_are_left_out(tmp_path):
    (tmp_path / RECORD_FILE).write_text(json.dumps({**WHOLE, "color": "red"}))
    assert read_record(tmp_path / RECORD_FILE) is not None


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2},
        {"kind": None},
        {"kind": ["wandb"]},
        {"step": "5"},
        {"step": 5.5},
        {"step": -1},
        {"step": True},
        {"rows": None},
        {"left_out": "many"},
        {"attempt": [1]},
        {"state": 3},
        {"folder": 7},
        {"wanted": {}},
        {"mode": 1},
        {"rebuilt": "no"},
        {"updated": "now"},
        {"id": None},
    ],
)
def test_a_value_of_another_kind_makes_it_none(tmp_path, change):
    """Sums and comparisons of records would end with a traceback."""
    (tmp_path / RECORD_FILE).write_text(json.dumps({**WHOLE, **change}))
    assert read_record(tmp_path / RECORD_FILE) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, "\udce9", json.dumps({"schema": 1})])
def test_what_is_no_record_is_none(tmp_path, text):
    (tmp_path / RECORD_FILE).write_text(text, errors="surrogateescape")
    assert read_record(tmp_path / RECORD_FILE) is None
