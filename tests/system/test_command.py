"""Asking another program: what it said, and nothing where it cannot say anything."""

from __future__ import annotations

import sys
import time

from titanlab.system import CommandResult, output_of, run_command


def test_an_answer_is_what_was_said():
    script = r"import sys, os; sys.stdout.buffer.write(b'a\r\n\xff\n'); sys.stderr.write('no\n way\n'); sys.exit(3)"
    answer = run_command(sys.executable, "-c", script)
    assert answer == CommandResult(code=3, output="a\r\n\ufffd\n", errors="no\n way\n")
    assert answer.complaint == "no way"
    assert output_of(sys.executable, "-c", script) is None
    assert output_of(sys.executable, "-c", "print('yes')") == "yes\n"


def test_variables_are_those_that_are_given():
    script = "import os; print(os.environ.get('HOME'), os.environ['ONLY'])"
    assert output_of(sys.executable, "-c", script, environ={"ONLY": "this"}) == "None this\n"


def test_who_is_not_here_or_says_nothing_in_time_gives_none():
    begin = time.monotonic()
    assert run_command("no-such-program") is None
    assert run_command(sys.executable, "-c", "import time; time.sleep(60)", seconds=0.2) is None
    assert time.monotonic() - begin < 30
