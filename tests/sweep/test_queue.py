"""Where jobs stand, from what squeue and sacct of Slurm 22.05 print, and from what a supervisor notes."""

import time
from dataclasses import replace

import pytest

from titanlab.launch.contract import JobState
from titanlab.launch.local.local_job import LocalJob, write_local_job
from titanlab.launch.shape import Shape
from titanlab.launch.slurm import command as slurm_command
from titanlab.launch.slurm import states as slurm_states
from titanlab.launch.slurm.command import Reply
from titanlab.launch.submission import Submission
from titanlab.records.run_folder import RunFolder
from titanlab.records.run_status import Status
from titanlab.sweep.queue import job_states, silence
from titanlab.system.atomic_file import write_json
from titanlab.system.process_start import born_at

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

    def ask(*words, seconds=0.0):
        answers.asked.append(words)
        said = answers[words[0]]
        return Reply(output=said, problem=f"{words[0]} says: nothing" if said is None else None)

    for module in (slurm_states, slurm_command):
        monkeypatch.setattr(module, "ask_slurm", ask)
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
    assert all("--jobs=12,12" in words for words in slurm.asked[2:])


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


# A job whose step Slurm has killed for its memory. Its derived exit code would be 0:9 or, if the step was the last to
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


@pytest.mark.parametrize(
    ("place", "words", "raw"),
    [("[0-2%1]", "CANCELLED by 1000", "CANCELLED"), ("[0-4:2,1]", "DEADLINE", "DEADLINE")],
)
def test_jobs_that_ended_before_they_started_share_a_line(slurm, tmp_path, place, words, raw):
    """`scancel` of a whole array that waits: the queue shows it for MinJobAge, five minutes."""
    slurm["sacct"] = f"titanlab-aa|12_{place}|{words}|0:0|0|None assigned|JobHeldUser\n"
    for listed in ("", "".join(f"titanlab-aa|12|{place}|12|{raw}|BeginTime|0:00|\n" for place in range(3))):
        slurm["squeue"] = listed
        found = states(tmp_path)
        assert [(state.state, state.raw, state.job_id) for state in found] == [
            ("ended", raw, f"12_{index}") for index in range(3)
        ]
        assert all(state.never_started and state.exit_code is None for state in found)


def test_an_element_s_own_line_wins_over_that_of_those_that_wait(slurm, tmp_path):
    """What sacct of Slurm 22.05 printed for an array of which one ran when `scancel 12_[1-2]` came."""
    slurm["sacct"] = (
        "titanlab-aa|12_0|COMPLETED|0:0|5|n1|None\n"
        "titanlab-aa|12_1|CANCELLED by 0|0:0|3|n1|None\n"
        "titanlab-aa|12_[1-2%2]|CANCELLED by 0|0:0|0|None assigned|JobArrayTaskLimit\n"
    )
    found = states(tmp_path)
    assert [(state.raw, state.elapsed_seconds) for state in found] == [
        ("COMPLETED", 5.0),
        ("CANCELLED", 3.0),
        ("CANCELLED", 0.0),
    ]


@pytest.mark.parametrize("waiting", ["[0,2]", "[0-2]"])
def test_a_single_element_that_was_cancelled_while_it_waited_is_recorded_nowhere(slurm, tmp_path, waiting):
    """Its array knows it no more; the line of those that wait may be older than that."""
    slurm["squeue"] = "".join(f"titanlab-aa|12|{place}|12|PENDING|Priority|0:00|\n" for place in (0, 2))
    slurm["sacct"] = f"titanlab-aa|12_{waiting}|PENDING|0:0|0|None assigned|Priority\n"
    # Also a moment after it was submitted.
    for created in (LONG_AGO, time.time()):
        first, second, third = states(tmp_path, submission(created=created))
        assert (first.state, third.state) == ("pending", "pending")
        assert (second.state, second.raw, second.job_id) == ("ended", "CANCELLED", "12_1")
        assert second.never_started


def test_one_that_has_begun_and_that_nobody_knows_was_not_cancelled(slurm, tmp_path):
    slurm["squeue"] = "titanlab-aa|12|0|12|PENDING|Priority|0:00|\n"
    slurm["sacct"] = "titanlab-aa|12_[0]|PENDING|0:0|0|None assigned|Priority\n"
    run = RunFolder(tmp_path / "two")
    (run.path / "attempts" / "1").mkdir(parents=True)
    write_json(run.attempt_folder(1) / "job.json", {"token": "aa", "index": 1})
    assert [state.state for state in states(tmp_path)] == ["pending", "gone", "ended"]


def test_without_a_word_of_the_accounting_nobody_was_cancelled(slurm, tmp_path):
    """It may be a second behind, or not be there: an element that has ended leaves the queue as well."""
    slurm["squeue"] = "titanlab-aa|12|0|12|PENDING|Priority|0:00|\n"
    for listed in ("", None):
        slurm["sacct"] = listed
        assert [state.state for state in states(tmp_path)] == ["pending", "gone", "gone"]
        fresh = submission(created=time.time())
        assert [state.state for state in states(tmp_path, fresh)] == ["pending", "unknown", "unknown"]


def test_what_no_node_can_run_has_ended_at_once(slurm, tmp_path):
    """The accounting never hears of it."""
    slurm["squeue"] = "titanlab-aa|12|0|12|FAILED|BadConstraints|0:00|\n"
    (state,) = states(tmp_path, submission(runs=("one",)))
    assert (state.state, state.raw, state.reason, state.never_started) == ("ended", "FAILED", "BadConstraints", True)


def test_jobs_are_known_by_the_end_of_their_name(slurm, tmp_path):
    """An element takes its run's name when it starts; another job has the number of ours after a reset."""
    slurm["squeue"] = (
        "sweep/one-0123abcd-aa|12|0|13|RUNNING|None|0:05|n1\nsweep-aa|12|1|12|PENDING|None|0:00|\n"
        "theirs-bb|12|2|12|RUNNING|None|0:05|n4\n"
    )
    assert [state.state for state in states(tmp_path)] == ["running", "pending", "gone"]


def test_a_scheduler_that_does_not_answer_is_told(slurm, tmp_path):
    slurm["squeue"] = None
    (state,) = states(tmp_path, submission(runs=("one",)))
    assert (state.state, state.raw) == ("unknown", "UNKNOWN")
    assert state.reason == "the scheduler does not answer: squeue says: nothing"
    assert silence({("aa", 0): state}) == state.reason
    assert silence({("aa", 0): JobState(state="pending", reason="Priority")}) is None


def test_jobs_of_an_interrupted_submission_are_looked_for_among_all(slurm, tmp_path):
    intended = replace(submission(runs=("one",), state="intent"), job_id=None)
    slurm["squeue"] = "sweep/one-0123abcd-aa|12|0|12|RUNNING|None|0:05|n1\n"
    assert states(tmp_path, intended)[0].state == "running"
    assert not any(word.startswith("--jobs=") for words in slurm.asked for word in words)


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
