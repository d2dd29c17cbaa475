"""Slurm's commands: limits of time, errors in a line, forms of lists, and scontrol from inside a container."""

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from unittest import mock

import pytest

from tests.until import until
from titanlab.launch.slurm.command import QUESTIONS, answering_lines, ask_slurm, elements_of, expression_of
from titanlab.launch.slurm.command import scontrol as asked


def scontrol(*words, seconds, environ):
    """Its answer in a process with these variables alone."""
    with mock.patch.dict(os.environ, environ, clear=True):
        return asked(*words, seconds=seconds)


@pytest.fixture
def squeue(tmp_path, monkeypatch):
    """Writes a squeue that is first on PATH."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("SLURM_CONF", raising=False)

    def write(script):
        path = tmp_path / "squeue"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    return write


def test_of_many_lines_the_last_say_what_came_of_it(squeue):
    squeue("sleep 0.6; for i in 1 2 3; do echo \"squeue: error: attempt $i\" >&2; done; echo 'No  address' >&2; exit 1")
    said = r"squeue says after \d+ s: squeue: error: attempt 3; No address"
    assert re.fullmatch(said, ask_slurm("squeue").problem)


def test_one_that_does_not_answer_is_ended(squeue):
    squeue("exec sleep 60")
    begin = time.monotonic()
    assert ask_slurm("squeue", seconds=0.2).problem == "squeue gave no answer within 0.2 s"
    assert time.monotonic() - begin < 30


def test_a_configuration_that_is_not_there_is_told_at_once(squeue, tmp_path, monkeypatch):
    """Slurm's own commands look for it for a minute."""
    squeue("exec sleep 60")
    for path in (tmp_path / "none.conf", tmp_path):
        monkeypatch.setenv("SLURM_CONF", str(path))
        begin = time.monotonic()
        assert ask_slurm("squeue").problem == f"SLURM_CONF={path} is not a readable file"
        assert time.monotonic() - begin < 30


def test_a_persons_filters_are_not_ours(squeue, monkeypatch):
    for name in ("SQUEUE_PARTITION", "SQUEUE_FORMAT", "SCANCEL_INTERACTIVE", "SACCT_FORMAT", "SINFO_ALL"):
        monkeypatch.setenv(name, "theirs")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    monkeypatch.setenv("SLURM_CLUSTERS", "second")
    squeue("env")
    said = ask_slurm("squeue").output.splitlines()
    assert not [line for line in said if line.endswith("theirs")]
    assert {"SLURM_CLUSTERS=second", "SLURM_TIME_FORMAT=standard", "SLURM_BITSTR_LEN=0"} <= set(said)


@pytest.mark.parametrize(
    ("text", "elements"),
    [
        ("[0]", [0]),
        ("[0%1]", [0]),
        ("[0-3,7%2]", [0, 1, 2, 3, 7]),
        ("[1-9:2]", [1, 3, 5, 7, 9]),
        ("[0-9:2%4]", [0, 2, 4, 6, 8]),
        ("0-2,4", [0, 1, 2, 4]),
        # A list that was cut off names what can be read of it.
        ("[1,3,5...]", [1, 3]),
        ("[1,3,...]", [1, 3]),
        ("", []),
        ("[0-99999999999]", []),
        ("[0-9:0]", []),
        ("[N/A]", []),
    ],
)
def test_elements(text, elements):
    assert elements_of(text) == elements


@pytest.mark.parametrize(
    ("elements", "text"),
    [([], ""), ([3], "3"), ([2, 0, 1], "0-2"), ([7, 0, 1, 3, 3], "0-1,3,7"), (range(1000), "0-999")],
)
def test_an_expression_names_its_elements(elements, text):
    assert expression_of(elements) == text
    assert elements_of(text) == sorted(set(elements))


BASH = shutil.which("bash")


@pytest.fixture
def found(tmp_path):
    """A folder with a scontrol that prints how it was called, and fails at `fail`."""
    path = tmp_path / "bin" / "scontrol"
    path.parent.mkdir()
    path.write_text('#!/bin/sh\necho "$# $1 $2 $TZ $SLURM_TIME_FORMAT"\n[ "$1" != fail ] || { echo no >&2; exit 3; }\n')
    path.chmod(0o755)
    return path.parent


@pytest.fixture
def batch(tmp_path, found):
    """A batch file under way, whose shell has scontrol; returns what its processes find in their environment."""
    jobs = tmp_path / "the jobs"
    # What an earlier start of the job has asked.
    (jobs / ".12").mkdir(parents=True)
    (jobs / ".12" / "old.ask").write_text("requeue\n12_0\n")
    script = tmp_path / "batch.sh"
    script.write_text("\n".join([*answering_lines(jobs), f'echo "${QUESTIONS}"', "(trap '' TERM; sleep 600)", ""]))
    environ = {"PATH": f"{found}{os.pathsep}{os.environ['PATH']}", "SLURM_JOB_ID": "12"}
    shell = subprocess.Popen([BASH, script], env=environ, stdout=subprocess.PIPE, text=True, start_new_session=True)
    yield shell, {QUESTIONS: shell.stdout.readline().strip(), "PATH": "/nowhere"}
    os.killpg(shell.pid, signal.SIGKILL)
    shell.wait()
    shell.stdout.close()


def test_it_runs_here_without_a_container(found):
    answer = scontrol("show", "job", seconds=20, environ={"PATH": str(found), "TZ": "Asia/Tokyo"})
    assert (answer.code, answer.output) == (0, "2 show job UTC standard\n")
    assert scontrol("show", seconds=20, environ={"PATH": "/nowhere"}) is None


def test_it_runs_outside_the_container(batch):
    shell, inside = batch
    answer = scontrol("update", "JobName=a b *", "x", seconds=60, environ=inside)
    assert (answer.code, answer.output, answer.errors) == (0, "3 update JobName=a b * UTC standard\n", "")
    # As Slurm does to every process of a job that ends.
    os.killpg(shell.pid, signal.SIGTERM)
    for number in (signal.SIGUSR2, signal.SIGINT):
        loop = Path(f"/proc/{shell.pid}/task/{shell.pid}/children").read_text().split()[0]
        os.kill(int(loop), number)
    answer = scontrol("fail", seconds=60, environ=inside)
    assert (answer.code, answer.complaint) == (3, "1 fail UTC standard no")
    # Nothing stays, and what an earlier start has asked is not done now.
    assert list(Path(inside[QUESTIONS]).iterdir()) == []


def test_a_batch_file_that_has_ended_answers_nothing(batch):
    shell, inside = batch
    loop = Path(f"/proc/{shell.pid}/task/{shell.pid}/children").read_text().split()[0]
    shell.kill()
    shell.wait()
    until(lambda: not Path(f"/proc/{loop}").exists() or "Z" in Path(f"/proc/{loop}/stat").read_text().split()[2], 60)
    begin = time.monotonic()
    assert scontrol("show", seconds=0.3, environ=inside) is None
    assert time.monotonic() - begin < 20
    assert list(Path(inside[QUESTIONS]).iterdir()) == []
    assert scontrol("show", seconds=0.3, environ={QUESTIONS: "/nowhere/at/all", "PATH": "/nowhere"}) is None
