"""Ends of runs on the disk: they come back, they are written to a full disk too, and damage is one line."""

from __future__ import annotations

import errno
import json
import tempfile

import pytest

from titanlab.errors import ConfigError
from titanlab.records import outcome
from titanlab.records.outcome import Outcome, OutcomeKind, make_room, read_end, reserve_room, write_elsewhere, write_end
from titanlab.system.files import FolderGone

OUTCOME = Outcome(
    kind=OutcomeKind.OOM, step=3, steps=9, attempt=2, rank=1, cause="é", exit_code=70, ended=5.0, metrics={"loss": 1.5}
)


@pytest.fixture
def full(monkeypatch):
    """`full(n)`: the first n writes find a full disk. Returns the errors that were raised."""

    def make(count, code=errno.ENOSPC):
        raised, real = [], outcome.write_json

        def write_json(path, value, *, durable):
            if len(raised) < count:
                raised.append(OSError(code, "No space left on device"))
                raise raised[-1]
            real(path, value, durable=durable)

        monkeypatch.setattr(outcome, "write_json", write_json)
        return raised

    return make


def test_an_end_comes_back(tmp_path):
    path = tmp_path / "attempts" / "2" / "result.json"
    write_end(tmp_path, path, OUTCOME)
    assert read_end(path) == OUTCOME
    assert json.loads(path.read_text())["schema"] == 1


def test_without_a_file_there_is_no_end(tmp_path):
    assert read_end(tmp_path / "result.json") is None


def test_numbers_that_are_not_finite_are_null(tmp_path):
    write_end(tmp_path, tmp_path / "r.json", Outcome(kind=OutcomeKind.NAN, metrics={"loss": float("nan")}))
    assert read_end(tmp_path / "r.json").metrics == {"loss": None}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"kind": "tired"}, "kind=tired: is no end of a run in "),
        ({"kind": ...}, "kind=null: is no end of a run in "),
        ({"kind": 5}, "kind=5: must be text in "),
        ({"schema": 2}, "schema=2: "),
        ({"schema": ...}, "is no end of a run in "),
        ({"step": "3"}, "step=3: must be a whole number in "),
        ({"metrics": None}, "metrics=null: must be a mapping in "),
        ({"rank": 0.5}, "rank=0.5: must be a whole number in "),
    ],
)
def test_a_damaged_end_is_one_line(tmp_path, changed, said):
    content = OUTCOME.to_mapping() | changed
    (tmp_path / "r.json").write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))
    with pytest.raises(ConfigError) as caught:
        read_end(tmp_path / "r.json")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_keys_of_a_later_version_are_left_out(tmp_path):
    (tmp_path / "r.json").write_text(json.dumps(OUTCOME.to_mapping() | {"mood": "good"}))
    assert read_end(tmp_path / "r.json") == OUTCOME


def test_a_run_that_is_gone_is_not_made_anew(tmp_path):
    with pytest.raises(FolderGone):
        write_end(tmp_path / "gone", tmp_path / "gone" / "result.json", OUTCOME)
    assert list(tmp_path.iterdir()) == []


def test_room_is_reserved_once_and_freed(tmp_path):
    reserve_room(tmp_path)
    content = (tmp_path / ".reserve").read_bytes()
    assert len(content) == 1 << 17
    reserve_room(tmp_path)
    assert (tmp_path / ".reserve").read_bytes() == content
    make_room(tmp_path)
    make_room(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_on_a_full_disk_the_reserve_makes_room(tmp_path, full):
    reserve_room(tmp_path)
    raised = full(1)
    write_end(tmp_path, tmp_path / "result.json", OUTCOME)
    assert len(raised) == 1
    assert read_end(tmp_path / "result.json") == OUTCOME
    assert not (tmp_path / ".reserve").exists()


def test_a_disk_that_stays_full_is_an_error(tmp_path, full):
    reserve_room(tmp_path)
    full(2)
    with pytest.raises(OSError, match="No space left"):
        write_end(tmp_path, tmp_path / "result.json", OUTCOME)


def test_another_error_frees_nothing(tmp_path, monkeypatch):
    reserve_room(tmp_path)

    def broken(*given, **more):
        raise OSError(errno.ENAMETOOLONG, "File name too long")

    monkeypatch.setattr(outcome, "write_json", broken)
    with pytest.raises(OSError, match="too long"):
        write_end(tmp_path, tmp_path / "result.json", OUTCOME)
    assert (tmp_path / ".reserve").exists()


def test_an_end_without_a_run_goes_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / "none"))
    monkeypatch.setattr(outcome, "home", lambda: tmp_path)
    path = write_elsewhere(tmp_path / "single" / "name-12345678", OUTCOME)
    assert path.parent == tmp_path
    assert path.name.startswith("titanlab-name-12345678-attempt-2-")
    assert path.name.endswith("-result.json")
    assert read_end(path) == OUTCOME
    monkeypatch.setattr(outcome, "home", lambda: tmp_path / "none")
    assert write_elsewhere(tmp_path, OUTCOME) is None
