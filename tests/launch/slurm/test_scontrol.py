"""scontrol where the process of a job has it, and where only the shell of its batch file has."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.until import until
from titanlab.launch.slurm.command import QUESTIONS, answering_lines, scontrol

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
    assert (answer.code, answer.complaint) == (3, "no")
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
