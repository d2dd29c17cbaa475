"""Asking Slurm: a limit to its time, and a reason in a line where it does not answer."""

import time

import pytest

from titanlab.launch.slurm.command import ask_slurm


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


def test_an_answer(squeue):
    squeue("echo one; echo two >&2")
    reply = ask_slurm("squeue")
    assert (reply.output, reply.errors, reply.problem, reply.is_here) == ("one\n", "two\n", None, True)


def test_what_it_says_against_it(squeue):
    squeue("echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    reply = ask_slurm("squeue")
    assert (reply.output, reply.problem) == (
        None,
        "squeue says: slurm_load_jobs error: Unable to contact slurm controller",
    )


def test_of_many_lines_the_last_say_what_came_of_it(squeue):
    squeue("sleep 0.6; for i in 1 2 3; do echo \"squeue: error: attempt $i\" >&2; done; echo 'No  address' >&2; exit 1")
    assert ask_slurm("squeue").problem == "squeue says after 1 s: squeue: error: attempt 3; No address"


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
        assert ask_slurm("squeue").problem == f"SLURM_CONF={path} is no file that can be read"
        assert time.monotonic() - begin < 30


def test_a_command_that_is_not_installed(squeue):
    reply = ask_slurm("no-such-command")
    assert (reply.output, reply.problem, reply.is_here) == (None, "there is no no-such-command on PATH", False)


def test_a_persons_filters_are_not_ours(squeue, monkeypatch):
    for name in ("SQUEUE_PARTITION", "SQUEUE_FORMAT", "SCANCEL_INTERACTIVE", "SACCT_FORMAT", "SINFO_ALL"):
        monkeypatch.setenv(name, "theirs")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    monkeypatch.setenv("SLURM_CLUSTERS", "second")
    squeue("env")
    said = ask_slurm("squeue").output.splitlines()
    assert not [line for line in said if line.endswith("theirs")]
    assert {"SLURM_CLUSTERS=second", "SLURM_TIME_FORMAT=standard", "SLURM_BITSTR_LEN=0"} <= set(said)
