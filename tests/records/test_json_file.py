"""JSON files of runs: objects are read, and what is none is one line that names the file."""

import json
import os

import pytest

from titanlab.errors import ConfigError
from titanlab.records import loaded, read_optional, read_typed
from titanlab.records.files import RESTORE


def refusal(action, *given, **more):
    with pytest.raises(ConfigError) as caught:
        action(*given, **more)
    return str(caught.value)


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (b"", "is not JSON ("),
        (b"{", "is not JSON ("),
        (b"\xff", "is not JSON ("),
        (b"[" * 100_000, "is not JSON ("),
        (b"1" * 5000, "is not JSON ("),
        (b'{"steps": 1' + b"0" * 400 + b"}", "is not JSON (a number in it is larger than any float)"),
        (b"[]", "holds list, not an object"),
        (b"null", "holds NoneType, not an object"),
        (b'"x"', "holds str, not an object"),
    ],
)
def test_what_is_no_object_is_one_line(tmp_path, content, rule):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    assert refusal(read_typed, path, dict, schema=1).startswith(f"run={path}: {rule}")
    assert refusal(read_typed, path, dict, schema=1).endswith(f"; {RESTORE}")
    assert refusal(read_typed, path, dict, schema=1, cure="try again").endswith("; try again")
    assert read_optional(path) is None


def test_what_is_no_file_is_one_line(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name, reason in (("folder", "is a folder"), ("pipe", "is not a regular file")):
        path = tmp_path / name
        assert (
            refusal(read_typed, path, dict, schema=1)
            == f"run={path}: cannot be read ({reason}); ask its owner for permission"
        )
        assert read_optional(path) is None


def test_half_of_a_pair_of_surrogates_can_be_printed():
    assert loaded(r'{"a": "x\ud800y", "\udc00": 1}') == {"a": "x?y", "?": 1}
    # A whole pair is a letter.
    assert loaded(json.dumps("🎉")) == "🎉"
    assert loaded(r'"\u00e9"') == "é"
