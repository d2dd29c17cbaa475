"""The command line around every verb: which verb is called, what its errors come to, and output that nobody takes."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from titanlab.cli import main, verbs
from titanlab.errors import ConfigError, TitanlabError


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., int]], None]:
    """Puts a function in place of what `titanlab status` calls."""

    def put(function: Callable[..., int]) -> None:
        monkeypatch.setattr(verbs, "main_of", lambda name: function)

    return put


def raising(error: BaseException) -> Callable[..., int]:
    def function(arguments):
        raise error

    return function


def test_a_verb_gets_its_arguments_and_its_code_is_returned(verb):
    given = []
    verb(lambda arguments: given.append(arguments) or 7)
    assert main(["status", "a b", "--json"]) == 7
    (args,) = given
    assert (args.sweep, args.json, args.watch) == ("a b", True, False)


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("a", "x\ny", "is wrong", "mend it"), 2, "error: a=x y: is wrong; mend it\n"),
        (TitanlabError("it\nfailed"), 1, "error: it failed\n"),
        (OSError(errno.ENOSPC, "No space left on device", "/f"), 1, "error: the disk is full (/f): make room\n"),
        (
            PermissionError(errno.EACCES, "Permission denied", "/of/another"),
            2,
            "error: path=/of/another: cannot be used (Permission denied); ask its owner for permission, or name another path\n",
        ),
        (KeyboardInterrupt(), 130, "error: interrupted; nothing was started\n"),
        (SystemExit(None), 0, ""),
        (SystemExit(3), 3, ""),
    ],
)
def test_errors_are_one_line_and_an_exit_code(verb, capsys, error, code, line):
    verb(raising(error))
    assert main(["status"]) == code
    assert capsys.readouterr() == ("", line)


def test_a_verb_that_cleans_up_does_so_at_sigterm_too(verb, capsys):
    cleaned = []

    def waits(arguments):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        finally:
            cleaned.append(True)

    before = signal.getsignal(signal.SIGTERM)
    verb(waits)
    assert main(["tokenize", "a", "b"]) == 130
    assert (cleaned, capsys.readouterr().err) == ([True], "error: interrupted\n")
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("line", ["train", "resume NAME"])
def test_a_verb_that_trains_says_how_to_go_on_after_a_full_disk(verb, capsys, line):
    verb(raising(OSError(errno.ENOSPC, "No space left on device")))
    assert main(line.split()) == 1
    assert capsys.readouterr().err.endswith(", then go on with titanlab resume or retry\n")


@pytest.mark.parametrize(
    "line",
    [
        "status NAME",
        "export NAME --into x",
        "import . --into NAME",
        "clean --runs NAME",
        "train data=tokens data.folder=NAME",
    ],
)
def test_a_name_that_no_file_can_have_is_one_line(command, line):
    said = command(line.replace("NAME", "n" * 300))
    assert said.refusal["key"] == "path"
    assert said.refusal["rule"] == "cannot be used (File name too long)"


@pytest.mark.parametrize("error", [PermissionError(13, "no"), BrokenPipeError(32, "Broken pipe"), KeyError("x")])
def test_an_error_of_titanlab_itself_is_not_hidden(verb, error):
    """A broken pipe may be one to a process of titanlab's own; only that of its output is of no interest."""
    verb(raising(error))
    with pytest.raises(type(error)):
        main(["status"])


def titanlab(arguments: str, shell: str, **environ: str) -> subprocess.CompletedProcess[bytes]:
    """Runs a command line of the shell in which "$@" is `titanlab ARGUMENTS`."""
    return subprocess.run(
        ["bash", "-c", shell, "bash", sys.executable, "-m", "titanlab", *arguments.split()],
        env={**os.environ, **environ},
        capture_output=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(("arguments", "unbuffered"), [("--help", "1"), ("status --help", "")])
def test_whoever_reads_no_more_gets_no_traceback(tmp_path, arguments, unbuffered):
    # The fifo's only reader has ended before the command writes.
    shell = f'mkfifo {tmp_path}/p; (exec <{tmp_path}/p) & exec 3>{tmp_path}/p; wait; "$@" >&3'
    done = titanlab(arguments, shell, PYTHONUNBUFFERED=unbuffered)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("arguments", "unbuffered"),
    [
        ("--help", ""),
        ("status --json", "1"),
        *(
            pytest.param(line, "1", marks=pytest.mark.full)
            for line in ("--help", "train --cfg job", "sweep +sweeps=quickstart_layouts --dry-run")
        ),
    ],
)
def test_output_that_a_full_disk_does_not_take_is_a_failure(tmp_path, arguments, unbuffered):
    """A script that redirects a table or JSON would go on with an empty file."""
    done = titanlab(arguments, f'cd {tmp_path}; "$@" >/dev/full', PYTHONUNBUFFERED=unbuffered)
    assert (done.returncode, done.stderr) == (1, b"error: the disk is full: make room\n")


@pytest.mark.full
def test_a_run_whose_messages_a_full_disk_does_not_take_is_done(tmp_path):
    run = "train data=synthetic training.steps=1 optimizer.schedule.warmup_steps=1 training.seq_len=64"
    done = titanlab(run, f'cd {tmp_path}; "$@" >/dev/full')
    assert (done.returncode, done.stderr) == (0, b"")


def test_characters_that_the_output_does_not_have_are_replaced():
    done = titanlab("--help", '"$@"', PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"usage: titanlab VERB [ARGUMENT ?]" in done.stdout


def test_a_file_s_name_that_is_no_text_is_shown():
    """A name of bytes that are not UTF-8 comes as lone surrogates, which UTF-8 cannot write."""
    code = "from titanlab.cli import main, verbs; verbs.main_of = lambda name: lambda given: print(given.sweep) or 0; "
    code += "import sys; sys.exit(main())"
    environ = {**os.environ, "PYTHONIOENCODING": "utf-8:strict", "PYTHONUTF8": "1"}
    command = [sys.executable, "-c", code, "status", b"a\xffb"]
    done = subprocess.run(command, env=environ, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"a?b\n", b"")
