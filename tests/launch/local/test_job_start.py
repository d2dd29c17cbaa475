"""The command of a job's ranks, and the controller that its logs name."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.launch.slurm.printed import submission
from titanlab.launch.local import supervisor as job_start
from titanlab.launch.local.supervisor import controller_of, start


@pytest.fixture
def controller(monkeypatch):
    """What submitit's controller is given."""
    from submitit.local import local

    given = {}

    def started(folder, command, **more):
        given.update(more, folder=folder, command=command)

    monkeypatch.setattr(local, "start_controller", started)
    return given


def local(folder, **changes):
    return replace(submission("aa", runs=("one", "two"), launcher="local"), folder=str(folder), **changes)


def test_the_command_runs_in_the_folder_of_the_submission_without_foreign_ranks(tmp_path, controller, monkeypatch):
    """A job that is started inside of another job must not join its ranks."""
    place = tmp_path / "it's; a $HOME `folder`"
    place.mkdir()
    monkeypatch.setattr("titanlab.launch.submission.Submission.command", lambda *given: ["-c", SHOW])
    start(tmp_path, local(place), 1, ["0", "1"], variables={"EXTRA": "a b'c\"; $X"})
    environment = {**os.environ, "MASTER_ADDR": "elsewhere", "MASTER_PORT": "1"}
    done = subprocess.run(
        controller["command"], shell=True, env=environment, capture_output=True, text=True, check=True, cwd="/"
    )
    assert done.stdout.splitlines() == [str(place), "None", "None", "a b'c\"; $X"]


SHOW = """
import os
print(os.getcwd())
for name in ("MASTER_ADDR", "MASTER_PORT", "EXTRA"):
    print(os.environ.get(name))
"""


def test_a_folder_that_is_gone_keeps_no_job_from_starting(tmp_path, controller, monkeypatch):
    monkeypatch.setattr("titanlab.launch.submission.Submission.command", lambda *given: ["-c", "print(1)"])
    start(tmp_path, local(tmp_path / "gone"), 0, [], variables={})
    done = subprocess.run(shlex.split(controller["command"]), capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("1\n", "")


def test_the_controller_gets_the_job_s_ranks_and_devices(tmp_path, controller):
    made = local(tmp_path)
    start(tmp_path, made, 1, ["2", "GPU-3"], variables={})
    assert controller["tasks_per_node"] == made.shape.processes
    assert controller["cuda_devices"] == "2,GPU-3"
    assert controller["folder"] == tmp_path / "jobs" / "aa_1"
    assert controller["folder"].is_dir()
    words = shlex.split(controller["command"])
    assert words[-3:] == [str(tmp_path), "aa", "1"]
    assert sys.executable in words


def test_the_newest_log_names_the_controller(tmp_path):
    assert controller_of(tmp_path, "aa", 0) is None
    folder = job_start._folder(tmp_path, "aa", 0)
    folder.mkdir(parents=True)
    for number, name in enumerate(("90_0_log.out", "17_0_log.out", "x_0_log.out", "55_1_log.out", "5_10_log.out")):
        path = folder / name
        path.write_text("")
        os.utime(path, (number, number))
    # Logs of other ranks are later, and a file of another name is none of submitit's.
    assert controller_of(tmp_path, "aa", 0) == 17
    assert controller_of(tmp_path, "aa", 1) is None
