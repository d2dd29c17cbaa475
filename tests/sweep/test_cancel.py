"""Jobs of a sweep are cancelled: running ones save and end, waiting ones leave the queue."""

from tests.sweep.conftest import names, quiet
from titanlab.sweep import cancel
from titanlab.sweep.reconcile import reconcile
from titanlab.sweep.retry import retry


def test_cancel_ends_elements_of_arrays_and_tells_those_that_run(slurm, sweep):
    done = cancel(sweep, quiet)
    assert (done.stopping, done.withdrawn) == ([names(sweep)[3]], [names(sweep)[4]])
    # Whoever runs is told, and has the time that it needs.
    assert slurm.jobs()[101]["states"] == ["COMPLETED", "FAILED", "FAILED", "RUNNING", "CANCELLED"]
    assert slurm.jobs()[101]["signals"] == [[3, "INT"]]
    assert sweep.run(names(sweep)[3]).asked_to_cancel()
    outcome = sweep.run(names(sweep)[4]).result()
    assert (outcome.kind, outcome.cause) == ("cancelled", "cancelled before it started")
    # What was cancelled can be done after all.
    assert [each.run.path.name for each in retry(sweep, quiet, names=[names(sweep)[4]])] == [names(sweep)[4]]


def test_whoever_cancels_twice_does_not_want_to_wait(slurm, sweep):
    cancel(sweep, quiet, names=[names(sweep)[3]])
    done = cancel(sweep, quiet, names=[names(sweep)[3]])
    assert done.stopping == [names(sweep)[3]]
    assert (slurm.jobs()[101]["states"][3], len(slurm.jobs()[101]["signals"])) == ("CANCELLED", 1)


def test_cancel_is_one_call_for_all_that_wait_and_one_for_all_that_run(slurm, sweep):
    retry(sweep, quiet, outcomes=["hang", "oom"])
    cancel(sweep, quiet)
    calls = [sorted(line.split()) for line in (slurm.folder / "scancel.calls").read_text().splitlines()]
    assert sorted(calls) == [["--signal=INT", "101_[3]"], ["101_[4]", "102_[0-1]"]]


def test_elements_that_somebody_took_out_of_the_queue_are_cancelled_and_can_be_done_again(slurm, sweep):
    """`scancel 101_4`: Slurm itself keeps no record of it."""
    slurm.put(101, "REMOVED", 4)
    reconcile(sweep)
    (run,) = sweep.find([names(sweep)[4]])
    outcome = run.result()
    assert (outcome.kind, outcome.cause) == ("cancelled", "the job was cancelled before it started")
    assert outcome.scheduler == {"job_id": "101_4", "state": "CANCELLED", "exit_code": None}
    done = retry(sweep, quiet, outcomes=["cancelled"])
    assert [each.run.path.name for each in done] == [run.path.name]
    assert [len(job["states"]) for job in slurm.jobs().values()] == [5, 1]
