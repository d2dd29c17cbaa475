"""Records of a hang on disk, whole, damaged and foreign."""

import json

import pytest

from tests import tiny
from titanlab.records import read_hang, write_hang
from titanlab.records.hang import hang_folder, parse_hang

FORWARD = {"file": "titanlab/train/assemble.py", "line": 228, "function": "forward_backward"}


def values(**changes):
    collective = {
        "group": "0",
        "sequence": 3,
        "operation": "all_reduce",
        "sizes": [[7], [2, 3]],
        "dtypes": ["Float", "Long"],
        "is_message": False,
        "is_done": False,
        "created": 1.5,
    }
    return {
        "schema": 1,
        "rank": 0,
        "time": 1.0,
        "state": "waits",
        "phase": "step 4",
        "step": 3,
        "seconds": 9,
        "limit": None,
        "activity": "",
        "source": FORWARD,
        "stack": [FORWARD],
        "coordinates": {"shard": 0},
        "groups": {"0": {"axis": "shard", "ranks": [0, 1]}},
        "messages": None,
        "collectives": [collective],
        **changes,
    }


@pytest.fixture
def run(tmp_path):
    return tiny.begin(tiny.recipe(tmp_path, shard=2))


def test_what_is_written_is_read(run):
    assert read_hang(run, 1) == read_hang(run, 7) == ({}, {})
    write_hang(run, 1, parse_hang(values()))
    records, damaged = read_hang(run, 1)
    assert (records, damaged) == ({0: parse_hang(values())}, {})
    assert records[0].groups["0"].ranks == (0, 1)
    assert records[0].collectives[0].sizes == ((7,), (2, 3))
    assert str(records[0].source) == "forward_backward (titanlab/train/assemble.py:228)"


DAMAGE = {
    "empty": ("", "is no JSON"),
    "cut": (json.dumps(values())[:90], "is no JSON"),
    "a list": ("[]", "holds list and no object"),
    "a pickle": (b"\x80\x04cposix\nsystem\n(S'true'\ntR.", "is no JSON"),
    "zeros": (b"\0" * 10_000, "is no JSON"),
    "nested": ("[" * 100_000, "is no JSON"),
    "another schema": (values(schema=2), "schema 2 is not 1"),
    "another rank": (values(rank=5), "it is of rank 5"),
    "a missing key": ({"schema": 1, "state": "waits"}, "missing required field `rank`"),
    "an unknown state": (values(state="flies"), "'flies' - at `$.state`"),
    "a text as a number": (values(step="3"), "Expected `int`, got `str` - at `$.step`"),
    "true as a number": (values(rank=True), "Expected `int`, got `bool` - at `$.rank`"),
    "ranks of text": (
        values(groups={"0": {"axis": "shard", "ranks": ["0"]}}),
        "Expected `int`, got `str` - at `$.groups[...].ranks[0]`",
    ),
    "a group of text": (values(groups={"0": "shard"}), "Expected `object`, got `str` - at `$.groups[...]`"),
    "a size of text": (
        values(collectives=[{**values()["collectives"][0], "sizes": [["x"]]}]),
        "Expected `int`, got `str` - at `$.collectives[0].sizes[0][0]`",
    ),
    "a message to wait for": (
        values(messages={"runs": True, "stages": [], "sent": {}, "received": {}, "waiting": 3}),
        "got `int` - at `$.messages.waiting`",
    ),
    "messages to no rank": (
        values(messages={"runs": True, "stages": [0], "sent": {"x": 1}, "received": {}, "waiting": None}),
        "Expected `int`, got `str` - at `key` in `$.messages.sent`",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_record_is_named_in_one_line_and_hides_no_other(run, name):
    content, reason = DAMAGE[name]
    write_hang(run, 1, parse_hang(values(rank=1)))
    path = hang_folder(run, 1) / "rank-0.json"
    if isinstance(content, dict):
        content = json.dumps(content)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    records, damaged = read_hang(run, 1)
    assert (list(records), list(damaged)) == ([1], [0])
    assert damaged[0].startswith(f"{path}: ")
    assert reason in damaged[0]
    assert "\n" not in damaged[0]


def test_other_files_are_passed_over_and_one_that_is_too_long_is_not_read(run):
    write_hang(run, 1, parse_hang(values()))
    for name in ("rank-x.json", f"rank-{'9' * 30}.json", ".rank-1.json.tmp"):
        (hang_folder(run, 1) / name).write_text("{}")
    assert list(read_hang(run, 1)[0]) == [0]
    with (hang_folder(run, 1) / "rank-0.json").open("ab") as file:
        file.truncate((1 << 24) + 1)
    assert "more than 16777216 bytes" in read_hang(run, 1)[1][0]


def test_texts_that_would_steer_a_terminal_are_cleaned():
    found = parse_hang(values(phase="step\x1b[2J 4", source={**FORWARD, "function": "a\nb" + "c" * 9999}))
    assert found.phase == "step?[2J 4"
    assert found.source.function.startswith("a?bccc")
    assert len(found.source.function) == 500
