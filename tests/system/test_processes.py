"""Other programs, when a process has started, and which titanlab a child imports."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import titanlab
from titanlab.launch.processes import worker_command
from titanlab.system import CommandResult, module_command, output_of, process_start, process_state, run_command


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


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is not known")
def test_a_process_has_started_between_the_call_that_makes_it_and_its_first_output():
    before = time.time()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        after = time.time()
        start = process_start(process.pid)
    # The kernel counts in hundredths of a second.
    assert before - 0.02 <= start <= after + 0.02
    assert process_start(os.getpid()) < before


ROOT = Path(titanlab.__file__).parents[1]


@pytest.fixture
def strange_folder(tmp_path, monkeypatch):
    """The current folder, with files that have names of modules."""
    for name in ("random.py", "json.py", "titanlab.py"):
        (tmp_path / name).write_text(f"raise RuntimeError('{name} of the current folder')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["/bin", *sys.path[1:]])
    return tmp_path


def test_a_module_of_the_current_folder_is_not_imported(strange_folder):
    subprocess.run(module_command("titanlab.records.outcome"), check=True)


def test_a_rank_does_not_import_from_the_current_folder(strange_folder):
    done = subprocess.run(worker_command(strange_folder / "run"), capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "of the current folder" not in done.stderr
    assert "run: is no folder" in done.stderr


# As `python -m titanlab` in the clone has it, and as an interpreter or a notebook that was started there.
@pytest.mark.parametrize("first", [str(ROOT), ""])
def test_a_clone_that_is_not_installed_is_found_by_children_too(monkeypatch, first):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [first, *sys.path])
    assert "-P" not in module_command("titanlab.launch.rank")


def test_an_interpreter_elsewhere_does_not_import_from_its_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    assert "-P" in module_command("titanlab.launch.rank")


@pytest.mark.skipif(sys.platform != "linux", reason="the name is Linux's")
def test_a_process_whose_name_is_cut_inside_a_character_has_a_state():
    # Linux keeps 15 bytes of a name.
    script = "import ctypes; ctypes.CDLL(None).prctl(15, b'a name of 14 b\\xc3'); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=-1, stdout=-1) as process:
        process.stdout.readline()
        assert process_start(process.pid)
        assert process_state(process.pid) in ("S", "R")
        process.kill()
