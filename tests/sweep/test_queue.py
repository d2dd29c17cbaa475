"""Where jobs stand, from what squeue and sacct of Slurm 22.05 print, and from what a supervisor notes."""

import time
from dataclasses import replace

import pytest

from titanlab.launch.shape import Shape
from titanlab.run_folder import RunFolder
from titanlab.run_status import Status
from titanlab.sweep import queue
from titanlab.sweep.queue import JobState, job_states
from titanlab.sweep.submission import LocalJob, Submission, born_at, write_local_job

LONG_AGO = 1_700_000_000.0


def submission(token="aa", runs=("one", "two", "three"), *, launcher="slurm", state="submitted", created=LONG_AGO):
    shape = Shape(processes=1, tasks_per_node=1)
    given = {"code": "code", "shape": shape, "launch": {}, "runs": runs, "created": created, "state": state}
    return Submission(token=token, launcher=launcher, job_id="12", **given)


@pytest.fixture
def slurm(monkeypatch):
    """What the two commands print, None where one does not answer; and what they were asked."""

    class Answers(dict):
        asked: list

    answers = Answers(squeue="", sacct="")
    answers.asked = []

    def ask(*words):
        answers.asked.append(words)
        return answers[words[0]]

    monkeypatch.setattr(queue, "output_of", ask)
    return answers


def states(tmp_path, *submitted):
    found = job_states(submitted or (submission(),), tmp_path)
    return [found[key] for key in sorted(found)]


def test_an_array_in_the_queue(slurm, tmp_path):
    slurm["squeue"] = (
        "titanlab-aa|12|2|15|PENDING|Resources|0:00|\n"
        "titanlab-aa|12|1|14|RUNNING|None|1-02:03:04|n[1-2]\n"
        "titanlab-aa|12|0|12|PENDING|BeginTime|0:00|\n"
        "other|12|0|12|RUNNING|None|0:05|n4\n"
    )
    first, second, third = states(tmp_path)
    assert (first.state, first.job_id) == ("requeued", "12_0")
    assert second == JobState(
        state="running", raw="RUNNING", elapsed_seconds=93_784.0, nodes=("n1", "n2"), job_id="12_1"
    )
    assert (third.state, third.reason, third.nodes) == ("pending", "Resources", ())
    # One question each, for all jobs.
    assert [words[0] for words in slurm.asked] == ["sacct", "squeue"]
    states(tmp_path, submission("aa"), submission("bb"))
    assert all("--name=titanlab-aa,titanlab-bb" in words for words in slurm.asked[2:])


def test_ends_are_the_accountings(slurm, tmp_path):
    slurm["squeue"] = "titanlab-aa|12|0|12|FAILED|NonZeroExitCode|0:09|n1\n"
    slurm["sacct"] = (
        "titanlab-aa|12_0|FAILED|70:0|9|n1|None\n"
        "titanlab-aa|12_1|CANCELLED by 1000|0:15|100|n[3-4]|None\n"
        "titanlab-aa|12_2|OUT_OF_MEMORY|0:125|3|n1|OutOfMemory\n"
        "titanlab-aa|12_[3-5]|PENDING|0:0|0|None assigned|None\n"
    )
    first, second, third = states(tmp_path)
    assert (first.state, first.raw, first.exit_code, first.elapsed_seconds) == ("ended", "FAILED", 70, 9.0)
    assert (second.raw, second.exit_code, second.nodes) == ("CANCELLED", -15, ("n3", "n4"))
    assert (third.raw, third.exit_code, third.reason) == ("OUT_OF_MEMORY", None, "OutOfMemory")


# Of a job whose step Slurm has killed for its memory. Its derived exit code would be 0:9 or, if the step was the last to
# end, 0:0.
KILLED = """\
titanlab-aa|12_0|FAILED|9:0|1|n1|None
batch|12_0.batch|FAILED|9:0|1|n1|
python|12_0.0|CANCELLED by 0|0:9|1|n1|
"""


def test_a_step_that_was_killed_is_not_srun_s_exit_code(slurm, tmp_path):
    slurm["sacct"] = KILLED
    assert states(tmp_path, submission(runs=("one",))) == [
        JobState(state="ended", raw="FAILED", exit_code=-9, elapsed_seconds=1.0, nodes=("n1",), job_id="12_0")
    ]
    assert not any("--allocations" in words for words in slurm.asked)


def test_steps_say_nothing_of_other_jobs_or_of_one_that_did_well(slurm, tmp_path):
    """The first job's batch file is killed, the second's own exit code is 9, and the third went on after its step."""
    slurm["sacct"] = KILLED.replace("python|12_0.0", "batch|12_0.extern") + (
        "titanlab-aa|12_1|FAILED|9:0|1|n1|None\n"
        "python|12_1.0|FAILED|9:0|1|n1|\n"
        "titanlab-aa|12_2|COMPLETED|0:0|1|n1|None\n"
        "python|12_2.0|FAILED|0:9|1|n1|\n"
        "python|13_1.0|FAILED|0:9|1|n1|\n"
    )
    assert [state.exit_code for state in states(tmp_path)] == [9, 9, 0]


def test_the_queue_knows_better_what_lives(slurm, tmp_path):
    """The accounting still has the start before, which was preempted."""
    slurm["squeue"] = "titanlab-aa|12|0|12|RUNNING|None|0:09|n1\n"
    slurm["sacct"] = "titanlab-aa|12_0|PREEMPTED|0:0|9|n1|None\n"
    assert states(tmp_path, submission(runs=("one",)))[0].state == "running"


@pytest.mark.parametrize(
    ("squeue", "sacct", "state"),
    [
        ("", "", "gone"),
        ("", None, "gone"),
        # A job of the accounting that the queue no longer has is lost.
        ("", "titanlab-aa|12_0|RUNNING|0:0|9|n1|None\n", "gone"),
        (None, "", "unknown"),
        (None, None, "unknown"),
        (None, "titanlab-aa|12_0|COMPLETED|0:0|9|n1|None\n", "ended"),
        # Without accounting the queue's own word is what there is.
        ("titanlab-aa|12|0|12|TIMEOUT|TimeLimit|1:00|n1\n", None, "ended"),
        # ... and where there is some it comes a second later, with the exit code.
        ("titanlab-aa|12|0|12|FAILED|NonZeroExitCode|0:09|n1\n", "", "running"),
        (
            "titanlab-aa|12|0|12|FAILED|NonZeroExitCode|0:09|n1\n",
            "titanlab-aa|12_0|RUNNING|0:0|9|n1|None\n",
            "running",
        ),
        ("titanlab-aa|12|0|12|COMPLETING|None|0:09|n1\n", "", "running"),
        ("titanlab-aa|12|0|12|SUSPENDED|None|0:09|n1\n", "", "running"),
        ("titanlab-aa|12|0|12|REQUEUE_HOLD|None|0:09|\n", "", "requeued"),
    ],
)
def test_what_is_known_where_one_of_them_is_silent(slurm, tmp_path, squeue, sacct, state):
    slurm.update(squeue=squeue, sacct=sacct)
    assert states(tmp_path, submission(runs=("one",)))[0].state == state


def test_what_is_new_or_only_intended_is_not_gone(slurm, tmp_path):
    fresh = submission("aa", runs=("one",), created=time.time())
    intended = submission("bb", runs=("one",), state="intent")
    assert [state.state for state in states(tmp_path, fresh, intended)] == ["unknown", "unknown"]


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
