"""`titanlab doctor`: the report, its exit code, and that it needs no torch of its own."""

import json
import subprocess
import sys

import pytest

from titanlab.cli import environment
from titanlab.cli.verbs import main
from titanlab.doctor.checkup import Check
from titanlab.launch.launchers_schema import Slurm
from titanlab.system import fail, ok, warn

FOUND = [ok("torch", "2.13.0"), warn("NCCL", "slow \x1b[2J", "look at it"), fail("disk", "is full", "make room")]


@pytest.fixture
def given(monkeypatch):
    """What the checks were asked with, and what they find."""
    asked = []

    def made(runs, launch):
        asked.append((str(runs), launch))
        return [Check(section="devices", name=each.name, find=lambda each=each: [each]) for each in FOUND]

    monkeypatch.setattr(environment, "checks", made)
    return asked


def test_each_finding_is_a_line_and_a_fault_is_exit_code_1(given, capsys):
    assert main(["doctor", "--runs", "/elsewhere"]) == 1
    assert capsys.readouterr().out.splitlines()[:-1] == [
        "devices",
        "  ok    torch               2.13.0",
        "  warn  NCCL                slow ^[[2J",
        "                            → look at it",
        "  fail  disk                is full",
        "                            → make room",
    ]
    assert given == [("/elsewhere", None)]


def test_warnings_are_no_fault(given, shown, monkeypatch):
    monkeypatch.setattr("tests.cli.test_doctor.FOUND", FOUND[:2])
    assert "\n1 ok, 1 warn, 0 fail, in " in shown("doctor")


def test_as_json(given, capsys):
    assert main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["counts"] == {"ok": 1, "warn": 1, "fail": 1}
    assert found["findings"][2] == {
        "section": "devices",
        "name": "disk",
        "state": "fail",
        "text": "is full",
        "hint": "make room",
    }


def test_settings_of_slurm_are_composed(given, capsys):
    main(["doctor", "launch=slurm", "launch.partition=gpu"])
    assert given == [("runs", Slurm(partition="gpu"))]


def test_it_imports_no_torch():
    code = "import sys, titanlab.cli.environment; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
