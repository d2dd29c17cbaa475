"""Lines of logs on standard output: harmless on a terminal, unchanged into a pipe, and an end that is noticed."""

import io
import subprocess
import sys

import pytest

from titanlab.cli.inspect_runs import LogOutput
from titanlab.records import Line


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_no_control_characters():
    stream = Terminal()
    with LogOutput(width=1, stream=stream) as output:
        output.line(Line(time=0.0, rank=0, text=b"\x1b]0;title\x07 \xff\x1b[2J"))
    assert stream.getvalue() == "[rank 0] ^[]0;title^G \N{REPLACEMENT CHARACTER}^[[2J\n"


def line(text, rank=0):
    return Line(time=0.0, rank=rank, text=text)


def pipe():
    """A text stream over bytes, as standard output is."""
    return io.TextIOWrapper(io.BytesIO(), encoding="ascii")


def written(stream):
    return stream.buffer.getvalue()


def test_lines_wait_until_they_are_many_or_are_wanted():
    stream = pipe()
    output = LogOutput(width=None, stream=stream)
    output.line(line(b"a"))
    assert written(stream) == b""
    output.flush()
    assert written(stream) == b"a\n"
    output.line(line(b"b" * (1 << 16)))
    assert len(written(stream)) == 2
    output.line(line(b"c"))
    assert written(stream).endswith(b"b\nc\n")
    # Nothing waits: nothing is written.
    output.flush()


def test_a_note_is_on_standard_error_after_the_lines_before_it(capsys):
    stream = pipe()
    output = LogOutput(width=None, stream=stream)
    output.line(line(b"a"))
    output.note("a word \x1b]0;t\x07")
    assert written(stream) == b"a\n"
    said = capsys.readouterr()
    assert said.out == ""
    assert "a word ^[]0;t^G" in said.err


def test_a_stream_of_text_alone_gets_what_can_be_read():
    stream = io.StringIO()
    with LogOutput(width=None, stream=stream) as output:
        output.line(line(b"a\xff\x1b"))
    assert stream.getvalue() == "a\N{REPLACEMENT CHARACTER}\x1b\n"


@pytest.mark.parametrize(
    ("shell", "code", "said"), [("| :", 0, ""), (">/dev/full", 1, "error: the disk is full: make room\n")]
)
def test_lines_that_cannot_be_written_end_it(saved_run, shell, code, said):
    (saved_run / "logs").mkdir(exist_ok=True)
    (saved_run / "logs" / "rank-0.log").write_text("a\n" * (1 << 18))
    command = f'set -o pipefail; "$0" -m titanlab logs {saved_run} {shell}'
    done = subprocess.run(["bash", "-c", command, sys.executable], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, said)
