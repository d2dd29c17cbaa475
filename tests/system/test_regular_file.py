"""Files that a stranger can put where text is expected."""

import os
import tracemalloc

import pytest

from titanlab.system import open_to_write, read_bytes, read_text


def test_a_file_is_read(tmp_path):
    (tmp_path / "a").write_bytes("ä\r\nb\rc\n".encode())
    (tmp_path / "link").symlink_to("a")
    assert read_text(tmp_path / "link") == "ä\nb\nc\n"
    assert read_bytes(tmp_path / "a", most_bytes=8) == "ä\r\nb\rc\n".encode()


def test_a_small_file_takes_little_memory(tmp_path):
    """However large a file might be: a process with a limit on its memory reads its records too."""
    (tmp_path / "a").write_bytes(b"123")
    tracemalloc.start()
    try:
        assert read_bytes(tmp_path / "a") == b"123"
        assert tracemalloc.get_traced_memory()[1] < 1e7
    finally:
        tracemalloc.stop()


def test_what_never_ends_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "long").write_bytes(b"123456789")
    for name in ("pipe", "zero"):
        with pytest.raises(OSError, match="is no regular file"):
            read_text(tmp_path / name)
    with pytest.raises(OSError, match="has more than 8 bytes"):
        read_bytes(tmp_path / "long", most_bytes=8)
    with pytest.raises(IsADirectoryError):
        read_bytes(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "none")


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
    with pytest.raises(OSError, match="is no regular file"):
        open_to_write(tmp_path / "pipe", os.O_RDWR)


def next_descriptor():
    """The descriptor that the next open file gets: the same if none was left open."""
    descriptor = os.open(os.devnull, os.O_RDONLY)
    os.close(descriptor)
    return descriptor


def test_what_is_no_file_leaves_no_descriptor_open(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    before = next_descriptor()
    for name, reason in (("folder", "is a folder"), ("pipe", "is no regular file")):
        with pytest.raises(OSError, match=reason):
            read_bytes(tmp_path / name)
        assert next_descriptor() == before
