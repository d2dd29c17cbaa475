"""Where the jobs of several launchers stand; what each of them says of its own jobs is tested in `tests/launch`."""

import pytest

from tests.launch.slurm.printed import Answers, submission
from titanlab.launch import UNANSWERED, JobState
from titanlab.sweep.reconcile import job_states, silence


@pytest.fixture
def slurm(monkeypatch):
    """Slurm's commands, which say nothing."""
    return Answers(monkeypatch)


def test_jobs_of_every_launcher_are_told_together(slurm, tmp_path):
    slurm["squeue"] = "sweep-aa|12|0|12|RUNNING|None|0:05|n1\n"
    (tmp_path / "two").mkdir()
    found = job_states([submission(runs=("one",)), submission("bb", runs=("two",), launcher="local")], tmp_path)
    assert {key: state.state for key, state in found.items()} == {("aa", 0): "running", ("bb", 0): "pending"}
    assert job_states([], tmp_path) == {}


def test_a_silence_is_that_of_the_first_job_whose_scheduler_does_not_answer():
    waiting = JobState(state="pending", reason="Priority")
    unknown = JobState(state="unknown", raw=UNANSWERED, reason="no answer")
    assert silence({}) is None
    assert silence({("aa", 0): waiting}) is None
    assert silence({("aa", 0): waiting, ("aa", 1): unknown, ("bb", 0): unknown}) == "no answer"
