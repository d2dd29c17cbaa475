"""Files that are whole or absent."""

import json
import threading

import pytest

from titanlab.system import finite, write_json, write_text


def test_a_reader_never_sees_half_a_file(tmp_path):
    path = tmp_path / "file"
    texts = {letter * 200_000 for letter in "ab"}
    write_text(path, "a" * 200_000)
    over = threading.Event()

    def write():
        for _ in range(30):
            for text in sorted(texts):
                write_text(path, text)
        over.set()

    thread = threading.Thread(target=write)
    thread.start()
    while not over.is_set():
        assert path.read_text() in texts
    thread.join()
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "file.json"
    write_json(path, {"a": 1}, durable=True)
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "\ud800")
    assert json.loads(path.read_text()) == {"a": 1}
    assert [each.name for each in tmp_path.iterdir()] == ["file.json"]


def test_what_is_not_finite_is_null():
    value = {"a": float("nan"), "b": [float("inf"), 1.5, (2, -float("inf"))], 3: {"c": True}}
    assert finite(value) == {"a": None, "b": [None, 1.5, [2, None]], "3": {"c": True}}
