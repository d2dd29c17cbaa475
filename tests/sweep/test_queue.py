"""Where jobs stand, from what a supervisor notes; tests of what Slurm prints are in `tests/launch/slurm`."""

import time
from dataclasses import replace

import pytest

from tests.launch.slurm.printed import Answers, states, submission
from titanlab.launch.contract import UNANSWERED, JobState
from titanlab.launch.local.queue import LocalJob, write_local_job
from titanlab.records.run_folder import RunFolder, Status
from titanlab.sweep.reconcile import job_states, silence
from titanlab.system.processes import born_at


@pytest.fixture
def slurm(monkeypatch):
    """Slurm's commands, which say nothing."""
    return Answers(monkeypatch)


@pytest.mark.parametrize(
    ("started", "word", "updated", "state"),
    [
        (3600, "running", 90, "ended"),
        (3600, "running", 30, "running"),
        (3600, "ended", 30, "ended"),
        (3600, "prepared", 30, "ended"),
        (3600, None, None, "ended"),
        (None, None, None, "ended"),
        (30, "prepared", 90, "running"),
    ],
)
def test_a_job_of_another_host_lives_as_long_as_it_is_heard_of(slurm, tmp_path, started, word, updated, state):
    """Started, and with a status, so many seconds ago."""
    run = RunFolder(tmp_path / "one")
    run.path.mkdir()
    # A number that a process of this host has, too.
    job = LocalJob(state="running", host="other", pid=1, born=born_at(1))
    write_local_job(tmp_path, "aa", 0, replace(job, started=None if started is None else time.time() - started))
    if word is not None:
        run.write_status(Status(state=word, updated=time.time() - updated))
    local = submission(runs=("one",), launcher="local")
    assert [each.state for each in states(tmp_path, local)] == [state]
    with run.claim():
        assert [each.state for each in states(tmp_path, local)] == ["running"]


def test_jobs_of_this_host(slurm, tmp_path):
    runs = ("waits", "lives", "died", "starts", "over")
    for name in runs:
        (tmp_path / name).mkdir()
    local = submission(runs=runs, launcher="local")
    alive = LocalJob(state="running", pid=1, born=born_at(1), started=1.0)
    for index, job in enumerate(
        [None, alive, LocalJob(state="running", pid=1, born=0), LocalJob(state="starting"), LocalJob(state="cancelled")]
    ):
        if job is not None:
            write_local_job(tmp_path, "aa", index, job)
    assert [state.state for state in states(tmp_path, local)] == ["pending", "running", "ended", "pending", "ended"]
    # Whoever works on it, it runs.
    with RunFolder(tmp_path / "died").claim():
        assert states(tmp_path, local)[2].state == "running"
    assert slurm.asked == []


def test_jobs_of_every_launcher_are_told_together(slurm, tmp_path):
    slurm["squeue"] = "sweep-aa|12|0|12|RUNNING|None|0:05|n1\n"
    found = job_states([submission(runs=("one",)), submission("bb", runs=("two",), launcher="local")], tmp_path)
    assert {key: state.state for key, state in found.items()} == {("aa", 0): "running", ("bb", 0): "pending"}
    assert job_states([], tmp_path) == {}


def test_a_silence_is_that_of_the_first_job_whose_scheduler_does_not_answer():
    waiting = JobState(state="pending", reason="Priority")
    unknown = JobState(state="unknown", raw=UNANSWERED, reason="no answer")
    assert silence({}) is None
    assert silence({("aa", 0): waiting}) is None
    assert silence({("aa", 0): waiting, ("aa", 1): unknown, ("bb", 0): unknown}) == "no answer"
