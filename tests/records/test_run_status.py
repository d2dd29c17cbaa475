"""The status of a run: what is written is read, and what no version of titanlab writes is named."""

import json
import os
import socket
import time

import pytest

from titanlab.errors import ConfigError
from titanlab.records.run_folder import Status, read_status, write_status


@pytest.fixture
def path(tmp_path):
    return tmp_path / "status.json"


def test_status_round_trips_and_knows_its_words(path):
    status = Status(state="running", step=2, steps=3, attempt=1, seconds_left=1.5, metrics={"loss": 2.5})
    write_status(path, status)
    assert read_status(path) == status
    assert (status.pid, status.host, status.outcome) == (os.getpid(), socket.gethostname(), None)
    assert status.updated == pytest.approx(time.time(), abs=60)
    write_status(path, Status(state="running", metrics={"loss": float("nan")}))
    assert read_status(path).metrics == {"loss": None}
    before = path.read_bytes()
    with pytest.raises(ValueError, match="'sleeping' is none of"):
        write_status(path, Status(state="sleeping"))
    assert path.read_bytes() == before


def test_without_a_file_there_is_no_status(path):
    assert read_status(path) is None
    assert read_status(path / "deeper") is None


def test_a_later_version_may_add_keys_to_the_status(path):
    path.write_text(json.dumps({"schema": 1, "state": "prepared", "pid": 7, "host": "n1", "updated": 3.5, "new": 1}))
    assert read_status(path) == Status(state="prepared", pid=7, host="n1", updated=3.5)


@pytest.mark.parametrize(
    ("content", "begins"),
    [
        ({}, "state=null: is none of prepared, starting, running, saving, ended in "),
        ({"state": "running", "step": True}, "step=true: must be a whole number in "),
        ({"state": "running", "step": None}, "step=null: must be a whole number in "),
        ({"state": "running", "steps": 2.5}, "steps=2.5: must be a whole number in "),
        ({"state": "running", "outcome": 3}, "outcome=3: must be text in "),
        ({"state": "running", "seconds_left": "soon"}, "seconds_left=soon: must be a number in "),
        # What looks for that process read a path with it.
        ({"state": "running", "pid": "a\0"}, "pid="),
        ({"state": "running", "host": ["a"]}, "host="),
        ({"state": "running", "updated": None}, "updated=null: must be a number in "),
    ],
)
def test_a_damaged_value_is_named_with_its_file_and_the_cure(path, content, begins):
    path.write_text(json.dumps({"schema": 1, **content}))
    with pytest.raises(ConfigError) as raised:
        read_status(path)
    assert str(raised.value).startswith(begins)
    assert str(raised.value).endswith(f"{path}; remove that file: it is written anew when the run goes on")
