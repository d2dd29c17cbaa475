"""Files that are whole or absent; files and JSON of strangers."""

import json
import os
import threading
import tracemalloc

import pytest

from titanlab.system import finite, open_to_write, parse_json, read_bytes, read_text, write_json, write_text


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


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"a": 1', "Expecting"),
        (b'{"a":' * 100_000, "it is nested too deeply"),
        ("-" + "9" * 10_000, "a number in it is larger than any float"),
        (b'"\xff"', "can't decode"),
    ],
)
def test_json_that_cannot_be_parsed_is_one_line(text, reason):
    with pytest.raises(ValueError, match=reason) as refused:
        parse_json(text)
    assert len(str(refused.value).splitlines()) == 1


def test_values_are_those_of_json():
    text = '{"a": [1, -2, 0.5, 1e400, "11"], "b": null}'
    assert parse_json(text) == {"a": [1, -2, 0.5, float("inf"), "11"], "b": None}
    assert parse_json(b"1" + b"0" * 300) == 10**300


def test_a_file_is_read(tmp_path):
    (tmp_path / "a").write_bytes("ä\r\nb\rc\n".encode())
    (tmp_path / "link").symlink_to("a")
    assert read_text(tmp_path / "link") == "ä\nb\nc\n"
    # A small file takes little memory, however large it might be.
    tracemalloc.start()
    try:
        assert read_bytes(tmp_path / "a", most_bytes=8) == "ä\r\nb\rc\n".encode()
        assert tracemalloc.get_traced_memory()[1] < 1e7
    finally:
        tracemalloc.stop()


def next_descriptor():
    """The descriptor that the next open file gets: the same if none was left open."""
    descriptor = os.open(os.devnull, os.O_RDONLY)
    os.close(descriptor)
    return descriptor


def test_what_never_ends_is_refused_and_leaves_no_descriptor_open(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "long").write_bytes(b"123456789")
    before = next_descriptor()
    for name in ("pipe", "zero"):
        with pytest.raises(OSError, match="is not a regular file"):
            read_text(tmp_path / name)
    with pytest.raises(OSError, match="has more than 8 bytes"):
        read_bytes(tmp_path / "long", most_bytes=8)
    with pytest.raises(IsADirectoryError):
        read_bytes(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "none")
    assert next_descriptor() == before


def test_a_file_is_opened_for_writing_and_a_link_or_a_pipe_is_refused(tmp_path):
    """A stranger's folder may have a link to any file of the user where a run appends to its own."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for _ in range(2):
        descriptor = open_to_write(tmp_path / "log", flags)
        os.write(descriptor, b"line\n")
        os.close(descriptor)
    assert (tmp_path / "log").read_text() == "line\nline\n"
    (tmp_path / "link").symlink_to("log")
    (tmp_path / "nowhere").symlink_to("new")
    for name in ("link", "nowhere"):
        with pytest.raises(OSError, match="is a symbolic link, which is not followed"):
            open_to_write(tmp_path / name, flags)
    assert not (tmp_path / "new").exists()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="is not a regular file"):
        open_to_write(tmp_path / "pipe", os.O_RDWR)
