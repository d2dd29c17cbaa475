"""Lines of logs from either end, of files that are huge, damaged, growing, or gone."""

import os

import pytest

from titanlab.records import FileSpan, Growing, backward, complete_end, forward, logs
from titanlab.system import open_to_read


def span(path, start=0, end=None):
    return FileSpan(path=path, start=start, end=path.stat().st_size if end is None else end)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b"\n\n",
        b"a",
        b"a\n",
        b"a\nb",
        b"\na\n\nb\n",
        b"x" * 50 + b"\n" + b"y" * 7 + b"\n",
        b"\xff\x00\n\xfe",
    ],
)
def test_backward_gives_the_lines_of_forward_in_reverse(tmp_path, monkeypatch, content):
    monkeypatch.setattr(logs, "_BLOCK_BYTES", 8)
    path = tmp_path / "log"
    path.write_bytes(content)
    expected = content.removesuffix(b"\n").split(b"\n") if content else []
    assert list(forward(span(path))) == expected
    assert list(backward(span(path))) == expected[::-1]


def test_the_end_of_a_huge_file_is_read_without_the_rest(tmp_path):
    path = tmp_path / "log"
    with path.open("wb") as file:
        file.truncate(1 << 40)
        file.seek(0, os.SEEK_END)
        file.write(b"\nlast but one\nlast\n")
    found = backward(span(path))
    assert [next(found), next(found)] == [b"last", b"last but one"]


def test_a_line_without_end_is_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "MOST_LINE_BYTES", 10)
    monkeypatch.setattr(logs, "_BLOCK_BYTES", 4)
    path = tmp_path / "log"
    path.write_bytes(b"x" * 35)
    for found in (list(forward(span(path))), list(backward(span(path))), Growing(path).read(last=True)):
        assert max(map(len, found)) <= 16
        assert b"".join(found) == b"x" * 35


def test_only_complete_lines_are_before_the_end(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"whole\nhal")
    assert complete_end(path, 9) == 6
    path.write_bytes(b"hal")
    assert complete_end(path, 3) == 0


def test_what_is_no_file_is_refused_and_what_is_missing_is_empty(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="is no regular file"):
        open_to_read(tmp_path / "pipe")
    for name in ("pipe", "missing"):
        assert list(forward(FileSpan(path=tmp_path / name, start=0, end=9))) == []
        assert list(backward(FileSpan(path=tmp_path / name, start=0, end=9))) == []
        assert Growing(tmp_path / name).read(last=True) == []


def test_a_growing_file_gives_lines_once_they_are_complete(tmp_path):
    path = tmp_path / "log"
    log = Growing(path)
    assert log.read() == []
    path.write_bytes(b"one\ntw")
    assert log.read() == [b"one"]
    with path.open("ab") as file:
        file.write(b"o\nthr")
    assert log.read() == [b"two"]
    assert (log.read(last=True), log.read(last=True)) == ([b"thr"], [])


def test_a_file_that_is_cut_short_or_replaced_is_read_anew(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"one\ntwo\n")
    log = Growing(path)
    assert log.read() == [b"one", b"two"]
    path.write_bytes(b"cut\n")
    assert (log.read(), log.changed) == ([b"cut"], True)
    assert (log.read(), log.changed) == ([], False)
    (tmp_path / "new").write_bytes(b"another\n")
    (tmp_path / "new").replace(path)
    assert (log.read(), log.changed) == ([b"another"], True)
    path.unlink()
    assert (log.read(), log.changed) == ([], False)
