"""points.jsonl: the points of a sweep in their order; a damaged line is named."""

from __future__ import annotations

import json
import os

import pytest

from titanlab.errors import ConfigError
from titanlab.records import RunFolder, point_of, read_points


def write(folder, text):
    (folder / "points.jsonl").write_bytes(text if isinstance(text, bytes) else text.encode())


def test_without_a_file_there_is_no_point(tmp_path):
    assert read_points(tmp_path) == []
    assert read_points(tmp_path / "gone") == []
    write(tmp_path, "")
    assert read_points(tmp_path) == []
    # A file in place of the sweep's folder.
    assert read_points(tmp_path / "points.jsonl") == []


def test_lines_keep_their_order_and_empty_ones_are_skipped(tmp_path):
    lines = [
        {"point": {"seed": 2}, "run": "b"},
        {"run": None, "dropped": {"stage": "rule"}},
        {"point": {"ä": "\u2028"}},
    ]
    write(tmp_path, "\n".join(map(json.dumps, lines)).replace("\n", "\r\n\n"))
    assert read_points(tmp_path) == [lines[0], {**lines[1], "point": {}}, lines[2]]


def test_separators_of_unicode_in_a_text_end_no_line(tmp_path):
    write(tmp_path, json.dumps({"point": {"name": "a\u2028b\x85c"}, "run": "a"}, ensure_ascii=False) + "\n")
    assert read_points(tmp_path) == [{"point": {"name": "a\u2028b\x85c"}, "run": "a"}]


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("{", "line 2 is no JSON"),
        ("[" * 100_000, "line 2 is no JSON"),
        ("[]", "line 2 is no point of a sweep"),
        ("3", "line 2 is no point of a sweep"),
        ('{"point": null}', "line 2 is no point of a sweep"),
        ('{"point": []}', "line 2 is no point of a sweep"),
        ('{"run": 3}', "line 2 is no point of a sweep"),
        ('{"dropped": "rule"}', "line 2 is no point of a sweep"),
        (b"\xff", "is no text in UTF-8"),
    ],
)
def test_a_damaged_line_is_named(tmp_path, line, rule):
    (tmp_path / "run").mkdir()
    write(tmp_path, b'{"run": "run"}\n' + (line if isinstance(line, bytes) else line.encode()))
    with pytest.raises(ConfigError) as caught:
        read_points(tmp_path)
    assert str(caught.value).startswith(f"sweep={tmp_path / 'points.jsonl'}: {rule}; restore that file, or submit")
    assert point_of(RunFolder(tmp_path / "run")) == {}


def test_a_pipe_and_a_folder_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "points.jsonl")
    with pytest.raises(ConfigError, match=r"cannot be read \(is no regular file\)"):
        read_points(tmp_path)
    (tmp_path / "points.jsonl").unlink()
    (tmp_path / "points.jsonl").mkdir()
    with pytest.raises(ConfigError, match=r"cannot be read \(is a folder\)"):
        read_points(tmp_path)


def test_the_point_of_a_run(tmp_path):
    write(tmp_path, '{"point": {"seed": 1}, "run": "a"}\n{"point": {"seed": 2}, "run": "b"}\n{"run": null}\n')
    assert point_of(RunFolder(tmp_path / "b")) == {"seed": 2}
    assert point_of(RunFolder(tmp_path / "c")) == {}
    assert point_of(RunFolder(tmp_path / "gone" / "a")) == {}
