"""The status of a run: what is written is read, and what no version of titanlab writes is named."""

import json
import os
import socket
import time

import pytest

from titanlab.errors import ConfigError
from titanlab.records import RunFolder, Status


@pytest.fixture
def path(tmp_path):
    return tmp_path / "status.json"


def test_status_round_trips_and_knows_its_words(path):
    status = Status(state="running", step=2, steps=3, attempt=1, seconds_left=1.5, metrics={"loss": 2.5})
    RunFolder(path.parent).write_status(status)
    assert RunFolder(path.parent).status() == status
    assert (status.pid, status.host, status.outcome) == (os.getpid(), socket.gethostname(), None)
    assert status.updated == pytest.approx(time.time(), abs=60)
    RunFolder(path.parent).write_status(Status(state="running", metrics={"loss": float("nan")}))
    assert RunFolder(path.parent).status().metrics == {"loss": None}
    before = path.read_bytes()
    with pytest.raises(ValueError, match="'sleeping' is none of"):
        RunFolder(path.parent).write_status(Status(state="sleeping"))
    assert path.read_bytes() == before


def test_without_a_file_there_is_no_status(path):
    assert RunFolder(path.parent).status() is None
    assert RunFolder(path / "deeper").status() is None


def test_a_later_version_may_add_keys_to_the_status(path):
    path.write_text(json.dumps({"schema": 1, "state": "prepared", "pid": 7, "host": "n1", "updated": 3.5, "new": 1}))
    assert RunFolder(path.parent).status() == Status(state="prepared", pid=7, host="n1", updated=3.5)


@pytest.mark.parametrize(
    ("content", "begins"),
    [
        ({}, "state=null: is missing in "),
        ({"state": "running", "step": True}, "step=true: expected `int`, got `bool` in "),
        ({"state": "running", "step": None}, "step=null: expected `int`, got `null` in "),
        ({"state": "running", "steps": 2.5}, "steps=2.5: expected `int | null`, got `float` in "),
        ({"state": "running", "outcome": 3}, "outcome=3: expected `str | null`, got `int` in "),
        ({"state": "running", "seconds_left": "soon"}, "seconds_left=soon: expected `float | null`, got `str` in "),
        # What looks for that process read a path with it.
        ({"state": "running", "pid": "a\0"}, "pid="),
        ({"state": "running", "host": ["a"]}, "host="),
        ({"state": "running", "updated": None}, "updated=null: expected `float`, got `null` in "),
    ],
)
def test_a_damaged_value_is_named_with_its_file_and_the_cure(path, content, begins):
    path.write_text(json.dumps({"schema": 1, **content}))
    with pytest.raises(ConfigError) as raised:
        RunFolder(path.parent).status()
    assert str(raised.value).startswith(begins)
    assert str(raised.value).endswith(f"{path}; remove that file: it is written anew when the run goes on")
