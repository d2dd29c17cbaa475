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
    # On a full or absent disk the record stays as it is, and nothing stops.
    write_record(tmp_path / "none" / RECORD_FILE, Record(kind="wandb"))
    assert records_in(tmp_path / "none") == {}


@pytest.mark.parametrize(
    "change",
    [
        *({"schema": 2}, {"kind": None}, {"step": "5"}, {"step": 5.5}, {"step": -1}, {"step": True}, {"rows": None}),
        *({"left_out": "many"}, {"attempt": [1]}, {"state": 3}, {"folder": 7}, {"wanted": {}}, {"rebuilt": "no"}),
    ],
)
def test_a_value_of_another_kind_makes_it_none(tmp_path, change):
    """Sums and comparisons of records would end with a traceback."""
    # A field of a later version is left out.
    (tmp_path / RECORD_FILE).write_text(json.dumps({**WHOLE, "color": "red"}))
    assert read_record(tmp_path / RECORD_FILE) is not None
    (tmp_path / RECORD_FILE).write_text(json.dumps({**WHOLE, **change}))
    assert read_record(tmp_path / RECORD_FILE) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, "\udce9", json.dumps({"schema": 1})])
def test_what_is_no_record_is_none(tmp_path, text):
    (tmp_path / RECORD_FILE).write_text(text, errors="surrogateescape")
    assert read_record(tmp_path / RECORD_FILE) is None
