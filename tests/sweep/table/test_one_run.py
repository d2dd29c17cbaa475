"""One run as text: the facts of its row, and what explains its failure."""

import time

import pytest

from tests.sweep.made import begin, end
from tests.sweep.table.plain import row
from titanlab.records import Outcome, OutcomeKind
from titanlab.sweep import SweepTable, failure_text, row_details


def facts(**given):
    plain = {"speed": None, "memory_gib": None, "mfu_percent": None, "started": None, "world": None}
    return dict(row_details(row(**{**plain, **given})))


def test_of_a_run_of_which_nothing_is_known_only_the_state_is_told():
    assert facts(state="missing", outcome=None) == {"state": "missing"}
    silent = facts(oversubscribed=True, stale=False, attempt=0, cause="", steps=10)
    assert silent == {"state": "done"}


def test_each_fact_has_its_words():
    given = {"outcome": "oom", "cause": "no memory", "rank": 0, "exit_code": 0, "step": 0, "steps": 10}
    given |= {"attempt": 2, "previous_outcome": "hang", "parent_run": "a/b-1", "parent_step": 6, "seconds_left": 75.0}
    given |= {"world": 4, "device": "CPU", "precision": "fp8", "ac": "full", "schedule": "1f1b"}
    given |= {"compile": "blocks+loss", "loss": 4.25, "validation_loss": 0.0, "speed": 12345.6, "mfu_percent": 41.46}
    given |= {"oversubscribed": True, "memory_gib": 0.754, "launcher": "slurm", "job_id": "12_1"}
    given |= {"scheduler_state": "RUNNING", "queue_reason": "Resources", "stale": True, "folder": "/runs/a"}
    assert facts(**given, tracker_gap="3 steps are missing") == {
        "state": "oom",
        "cause": "no memory",
        # Zero is a value.
        "rank": 0,
        "exit code": 0,
        "step": "0 of 10",
        "attempt": "2, after hang",
        "began from": "step 6 of a/b-1",
        "time left": "1:15",
        "layout": "dp_s2, 4 processes on CPU",
        "techniques": "fp8, full, 1f1b, compiled blocks+loss",
        "loss": "4.2500",
        "validation loss": "0.0000",
        "speed": "12,346 tokens/s per device, MFU 41.5% (oversubscribed: more processes than cores)",
        "memory": "0.75 GiB",
        "job": "slurm 12_1 RUNNING",
        "waits for": "Resources",
        "tracker": "3 steps are missing",
        "code": "other than what is here now",
        "folder": "/runs/a",
    }
    assert facts(precision="bf16", ac="none", compile="off")["techniques"] == "bf16"
    assert facts(attempt=2)["attempt"] == 2


def test_moments_are_those_of_this_place():
    found = facts(started=1000.0, ended=2000.5)
    assert found["started"] == time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(1000))
    assert found["ended"] == time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(2000))


def explained(made, run):
    (found,) = SweepTable(made.folder).rows()
    return failure_text(run, found)


@pytest.mark.parametrize("kind", ["done", "cancelled", "walltime"])
def test_a_run_that_did_not_fail_explains_nothing(made, kind):
    begin(run := made.run("a"))
    (run.logs / "rank-0.log").parent.mkdir(exist_ok=True)
    (run.logs / "rank-0.log").write_text("a line")
    end(run, kind)
    assert explained(made, run) is None


def test_the_traceback_of_the_result_goes_before_all(made):
    begin(run := made.run("a"))
    note = Outcome(kind=OutcomeKind.CRASH, step=4, attempt=1, rank=3, cause="boom", traceback="of the rank")
    run.write_failure(note)
    end(run, "crash", rank=3, cause="boom", traceback="of the result\n\n")
    assert explained(made, run) == ("traceback of rank 3", "of the result")


def test_without_one_it_is_that_of_the_rank_that_failed(made):
    begin(run := made.run("a"))
    for rank in (1, 3):
        run.write_failure(
            Outcome(kind=OutcomeKind.CRASH, step=4, attempt=1, rank=rank, cause="boom", traceback=f"of rank {rank}\n")
        )
    end(run, "crash", rank=3, cause="boom")
    assert explained(made, run) == ("traceback of rank 3", "of rank 3")


def test_without_any_traceback_it_is_the_end_of_the_log(made):
    begin(run := made.run("a"))
    end(run, "crash", rank=1, cause="boom")
    log = run.logs / "rank-1.log"
    assert explained(made, run) is None
    log.parent.mkdir(exist_ok=True)
    log.write_text("")
    assert explained(made, run) is None
    log.write_bytes(b"\xff first\n" + b"".join(b"line %d\n" % number for number in range(100)))
    assert explained(made, run) == (f"end of {log}", "\n".join(f"line {number}" for number in range(70, 100)))
    # Of a log of one endless line only the end is read.
    log.write_text("a" * 200_000)
    assert explained(made, run) == (f"end of {log}", "a" * 50_000)
