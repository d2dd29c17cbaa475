"""A child process imports the same titanlab as its parent, and nothing that lies in the current folder."""

import subprocess
import sys
from pathlib import Path

import pytest

import titanlab
from titanlab.launch.processes import worker_command
from titanlab.system import module_command

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
