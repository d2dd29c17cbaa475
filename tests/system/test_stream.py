"""What an output stream can show, the text for one that cannot show all, and streams that the shell has closed."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys

import pytest

from titanlab.system import is_capable, lost_output
from titanlab.system.terminal import can_show, columns_of, note_lost_output, simplified

REPORT = """
import os, sys
from titanlab.system.terminal import open_closed_streams

open_closed_streams()
with open(sys.argv[1], "w") as file:
    assert sys.stdin.read() == ""
    print("lost")
    print("lost", file=sys.stderr, flush=True)
    # A child gets the three of them too.
    code = os.spawnlp(os.P_WAIT, "sh", "sh", "-c", "cat; echo lost; echo lost >&2")
    file.write(f"{file.fileno() > 2} {code}")
"""


class Screen:
    """A stream that is a terminal."""

    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("term", "capable"), [("xterm", True), ("screen-256color", True), ("dumb", False), ("unknown", False), ("", False)]
)
def test_a_terminal_is_capable_by_its_kind(term, capable):
    assert is_capable(Screen(), {"TERM": term}) is capable


def test_what_is_no_terminal_is_not_capable(tmp_path):
    closed = (tmp_path / "file").open("w")
    assert not is_capable(closed, {"TERM": "xterm"})
    closed.close()
    # `isatty` of a closed file raises; notebooks have streams without the method, daemons have none.
    for stream in (closed, io.StringIO(), object(), None):
        assert not is_capable(stream, {"TERM": "xterm"})


def test_the_width_is_that_of_the_terminal_now_and_80_without_one(tmp_path, monkeypatch):
    with (tmp_path / "file").open("w") as file:
        assert columns_of(file) == 80
        # Serial lines and some pseudo-terminals say 0.
        for columns in (123, 0):
            monkeypatch.setattr(os, "get_terminal_size", lambda descriptor, c=columns: os.terminal_size((c, 40)))
            assert columns_of(file) == (columns or 80)
    # A closed file, a stream without a descriptor, one without the method.
    for stream in (file, io.StringIO(), object()):
        assert columns_of(stream) == 80


@pytest.mark.parametrize(
    ("encoding", "text", "simple"),
    [
        ("utf-8", "µ…→ 中", None),
        ("ascii", "plain", None),
        ("latin-1", "µ·", None),
        ("ascii", "1·2 µs … − – → ×", "1-2 us . - - > x"),
        ("ascii", "中é", "??"),
        ("latin-1", "é→", "é>"),
        # Half of a pair, from a damaged name of a file.
        ("utf-8", "中\udce9", "中?"),
    ],
)
def test_other_characters_stand_for_those_that_an_encoding_lacks(encoding, text, simple):
    """One for one: the columns of tables stay aligned."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    assert can_show(stream, text) is (simple is None)
    assert simple is None or simplified(text, stream) == simple


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_becomes_the_null_device_here_and_in_children(tmp_path, closed):
    command = f'"$0" -c "$1" "$2" {closed}'
    words = ["sh", "-c", command, sys.executable, REPORT, tmp_path / "report"]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "report").read_text() == "True 0"


def test_only_text_for_standard_output_is_missed_and_its_first_error_is_kept():
    first = OSError(errno.ENOSPC, "full")
    note_lost_output(sys.stderr, OSError(errno.EIO, "of another stream"))
    note_lost_output(sys.stdout, first)
    note_lost_output(sys.stdout, OSError(errno.EIO, "later"))
    assert [lost_output(), lost_output()] == [first, None]
