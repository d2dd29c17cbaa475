"""Where jobs stand, from what squeue and sacct of Slurm 22.05 print."""

import time
from dataclasses import replace

import pytest

from tests.launch.slurm.printed import LONG_AGO, states, submission
from titanlab.launch import JobState
from titanlab.launch.slurm.command import Reply, slurm_states
from titanlab.records import RunFolder
from titanlab.system import write_json


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
    ("place", "words", "raw"), [("[0-2%1]", "CANCELLED by 1000", "CANCELLED"), ("[0-4:2,1]", "DEADLINE", "DEADLINE")]
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


def test_jobs_of_an_interrupted_submission_are_looked_for_among_all(slurm, tmp_path):
    intended = replace(submission(runs=("one",), state="intent"), job_id=None)
    slurm["squeue"] = "sweep/one-0123abcd-aa|12|0|12|RUNNING|None|0:05|n1\n"
    assert states(tmp_path, intended)[0].state == "running"
    assert not any(word.startswith("--jobs=") for words in slurm.asked for word in words)


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
        ("titanlab-aa|12|0|12|FAILED|NonZeroExitCode|0:09|n1\n", "titanlab-aa|12_0|RUNNING|0:0|9|n1|None\n", "running"),
        # An elastic job that was requeued and cancelled while it waited: the accounting never hears of it.
        (
            "titanlab-aa|12|0|12|CANCELLED|None|0:09|n1\n",
            "titanlab-aa|12_0|PENDING|0:0|0|None assigned|BeginTime\n",
            "ended",
        ),
        ("titanlab-aa|12|0|12|COMPLETING|None|0:09|n1\n", "", "running"),
        # The accounting still has the start before, which was preempted.
        ("titanlab-aa|12|0|12|RUNNING|None|0:09|n1\n", "titanlab-aa|12_0|PREEMPTED|0:0|9|n1|None\n", "running"),
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
    ("text", "seconds"),
    [
        ("0:00", 0.0),
        ("1:05", 65.0),
        ("2:00:01", 7201.0),
        ("1-00:00:00", 86_400.0),
        ("12-01:01:01", 1_040_461.0),
        ("INVALID", None),
        ("UNLIMITED", None),
        ("", None),
        ("5", None),
        ("-1:00", None),
    ],
)
def test_a_run_time_in_the_queue_is_read_in_seconds(slurm, tmp_path, text, seconds):
    slurm["squeue"] = f"titanlab-aa|12|0|12|RUNNING|None|{text}|n1\n"
    assert states(tmp_path, submission(runs=("one",)))[0].elapsed_seconds == seconds


@pytest.mark.parametrize(
    ("text", "exit_code"),
    [("0:0", 0), ("1:0", 1), ("0:9", -9), ("0:64", -64), ("0:65", None), ("2:15", 2), ("", None), ("1", None)],
)
def test_an_exit_code_is_the_code_or_the_signal_that_ended_the_job(slurm, tmp_path, text, exit_code):
    slurm["sacct"] = f"titanlab-aa|12|FAILED|{text}|3|n1|None\n"
    assert states(tmp_path, submission(runs=("one",)))[0].exit_code == exit_code


def test_lines_of_another_form_are_skipped(slurm, tmp_path):
    slurm["squeue"] = "slurm_load_jobs error\n\ntitanlab-aa|12|0\ntitanlab-aa|12|0|12|RUNNING|a|b|0:05|n1\n"
    slurm["sacct"] = "JobName|JobID\n\ntitanlab-aa|12_0|COMPLETED|0:0|9|n1|None|more\n"
    assert [state.state for state in states(tmp_path, submission(runs=("one",)))] == ["gone"]


def test_a_job_outside_an_array_has_its_own_number(slurm, tmp_path):
    slurm["squeue"] = "sweep/one-aa|12|N/A|12|RUNNING|None|0:05|n1\n"
    assert states(tmp_path, submission(runs=("one",)))[0].job_id == "12"
    slurm.update(squeue="", sacct="sweep/one-aa|12||0:0|x|None assigned|\n")
    (state,) = states(tmp_path, submission(runs=("one",)))
    # A line without a state is of no state that lives.
    assert state == JobState(state="ended", raw="", exit_code=0, job_id="12")


@pytest.mark.parametrize(
    ("errors", "state"), [("slurm_load_jobs error: Invalid job id specified", "gone"), ("", "unknown")]
)
def test_a_single_number_that_the_queue_does_not_know_is_an_answer(slurm, tmp_path, errors, state):
    slurm["squeue"] = Reply(output=None, errors=errors, problem="squeue says: no")
    found = slurm_states([submission(runs=("one",))], tmp_path)
    assert {key: value.state for key, value in found.items()} == {("aa", 0): state}
