"""A worker as a child process: what it is told, and how it ends. The worker is a script of a shell."""

import contextlib
import json
import signal

import pytest

from tests.until import until
from titanlab.distributed import ALONE
from titanlab.launch import processes as module
from titanlab.launch.watch import Child
from titanlab.records import OutcomeKind


@pytest.fixture
def start(tmp_path, monkeypatch):
    """`start("exit 3")`: a child that runs a script, in whose environment OUT is a folder."""
    children = []

    def of(script, **given):
        monkeypatch.setattr(module, "worker_command", lambda folder: ["sh", "-c", script])
        monkeypatch.setenv("OUT", str(tmp_path))
        given = {"attempt": 2, "config": {"a": [1]}, "log": tmp_path / "log", **given}
        children.append(Child(tmp_path, ALONE, **given))
        return children[-1]

    yield of
    for each in children:
        each.kill()
        with contextlib.suppress(BrokenPipeError):
            each._process.stdin.close()


def ended(child):
    until(lambda: child.poll() is not None, pause_seconds=0.01)
    return child.poll()


def test_the_first_line_is_the_recipe_and_later_ones_are_requests(start, tmp_path):
    child = start('read -r first; read -r second; printf "%s\n%s\n" "$first" "$second" > "$OUT/read"; exit 4')
    assert child.poll() is None
    child.ask_to_stop(OutcomeKind.CANCELLED, "a person")
    assert ended(child) == 4
    first, second = (json.loads(line) for line in (tmp_path / "read").read_text().splitlines())
    assert first == {"a": [1]}
    assert "a person" in second.values()
    # To one that has ended nothing more can be said, and that is no error.
    child.ask_to_stop(OutcomeKind.CANCELLED, "a person")
    child.show_stacks()
    child.kill()
    assert child.poll() == 4


def test_it_knows_its_rank_its_attempt_and_its_log(start, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "9")
    names = ("RANK", "WORLD_SIZE", "TITANLAB_ATTEMPT", "TITANLAB_TOLD", "TITANLAB_LOG")
    words = " ".join(f'"${name}"' for name in names)
    assert ended(start(f'printf "%s\\n" {words} > "$OUT/said"')) == 0
    assert (tmp_path / "said").read_text().split() == ["0", "1", "2", "1", str(tmp_path / "log")]


def test_stop_signals_do_not_reach_it(start, tmp_path):
    child = start('grep SigIgn /proc/self/status > "$OUT/ignored"')
    assert ended(child) == 0
    mask = int((tmp_path / "ignored").read_text().split()[1], 16)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2, signal.SIGXCPU):
        assert mask >> (number - 1) & 1


def test_killing_it_ends_what_it_has_started_too(start, tmp_path):
    child = start('sleep 60 & echo $! > "$OUT/other"; mv "$OUT/other" "$OUT/pid"; wait')
    until((tmp_path / "pid").exists, pause_seconds=0.01)
    other = int((tmp_path / "pid").read_text())
    child.kill()
    assert child.poll() == -signal.SIGKILL

    def is_over():
        try:
            with open(f"/proc/{other}/stat") as file:
                return file.read().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            return True

    until(is_over, pause_seconds=0.01)


def test_its_output_is_the_end_of_its_own_log(start, tmp_path):
    (tmp_path / "log").write_text("of an earlier start\n")
    child = start('printf "first\nlast\n" >> "$TITANLAB_LOG"')
    ended(child)
    assert child.output() == "first\nlast\n"


def test_without_a_log_there_is_no_output(start, tmp_path):
    child = start("exit 0")
    ended(child)
    assert child.output() == ""
    (tmp_path / "log").write_bytes(b"half \xc3")
    assert child.output() == "half \ufffd"
