"""Every job that has ended has a result, and what the scheduler says of it stands beside it."""

import time
from dataclasses import replace

import pytest

from tests import tiny
from tests.sweep.jobs import Jobs
from titanlab.distributed import write_stop
from titanlab.launch import JobState
from titanlab.records import Outcome, OutcomeKind, Status, StopReason, from_exception, from_exit
from titanlab.sweep import SweepFolder
from titanlab.sweep import reconcile as reconciling
from titanlab.sweep.reconcile import reconcile
from titanlab.system import write_json

FAILED = JobState(state="ended", raw="FAILED", exit_code=1, job_id="12_0")


@pytest.fixture
def jobs(tmp_path):
    return Jobs(tmp_path)


@pytest.fixture
def settled(jobs, monkeypatch):
    """The run after a look at the sweep, whose job is in the given state."""

    def look(run, state):
        job, index = jobs.job_of(run)
        monkeypatch.setattr(reconciling, "job_states", lambda submitted, sweep: {(job.token, index): state})
        assert reconcile(jobs.sweep) == {(job.token, index): state}
        return run.result()

    return look


def begun(jobs, **given):
    """A run of Slurm's whose job has begun an attempt, and nothing else."""
    run = jobs.run(1, launcher="slurm", **given)
    begin(jobs, run)
    return run


def begin(jobs, run):
    run.begin_attempt(run.config(), {})
    job, index = jobs.job_of(run)
    attempt = max(run.attempts())
    write_json(run.attempt_folder(attempt) / "job.json", {"token": job.token, "index": index})
    run.write_status(Status(state="running", step=3, steps=10, attempt=attempt))


@pytest.mark.parametrize("state", ["pending", "running", "requeued", "unknown"])
def test_as_long_as_a_job_may_live_nothing_is_written(jobs, settled, state):
    assert settled(begun(jobs), JobState(state=state, raw=state.upper())) is None


@pytest.mark.parametrize(
    ("raw", "code", "kind"),
    [
        ("TIMEOUT", -15, "walltime"),
        ("NODE_FAIL", 0, "node_fail"),
        ("OUT_OF_MEMORY", -125, "oom"),
        ("CANCELLED", -15, "cancelled"),
        ("PREEMPTED", -15, "preempted"),
        ("FAILED", 71, "hang"),
        ("FAILED", 1, "crash"),
        ("COMPLETED", 0, "crash"),
    ],
)
def test_a_run_without_a_result_gets_one_from_the_schedulers_word(jobs, settled, raw, code, kind):
    run = begun(jobs)
    result = settled(run, JobState(state="ended", raw=raw, exit_code=code, job_id="12_0"))
    assert (result.kind.value, result.step, result.steps, result.attempt) == (kind, 3, 10, 1)
    assert result.scheduler == {"job_id": "12_0", "state": raw, "exit_code": code}
    assert (run.status().state, run.status().outcome) == ("ended", kind)
    assert run.result(1) == result


@pytest.mark.parametrize(
    ("raw", "reason", "kind", "cause"),
    [
        ("CANCELLED", "JobHeldUser", "cancelled", "the job was cancelled before it started"),
        ("DEADLINE", "BeginTime", "walltime", "the job's deadline passed before it started"),
        ("FAILED", "BadConstraints", "infeasible", "Slurm failed the job before it started: BadConstraints"),
        ("FAILED", "JobLaunchFailure", "crash", "Slurm failed the job before it started: JobLaunchFailure"),
        ("BOOT_FAIL", None, "node_fail", "a node of the job could not be started"),
    ],
)
def test_a_job_that_ended_before_it_started_says_why(jobs, settled, raw, reason, kind, cause):
    run = jobs.run(1, launcher="slurm")
    result = settled(run, JobState(state="ended", raw=raw, reason=reason, elapsed_seconds=0.0, job_id="12_0"))
    assert (result.kind.value, result.cause, result.attempt, result.step) == (kind, cause, 0, 0)
    assert result.scheduler == {"job_id": "12_0", "state": raw, "exit_code": None}


def test_a_job_that_has_vanished_is_a_failed_node(jobs, settled):
    result = settled(begun(jobs), JobState(state="gone"))
    assert (result.kind, result.scheduler["state"]) == (OutcomeKind.NODE_FAIL, "GONE")
    assert "vanished" in result.cause


def test_a_rank_that_could_say_why_is_believed_first(jobs, settled):
    run = begun(jobs)
    run.write_failure(from_exception(ConnectionError("Connection closed by peer"), rank=0))
    run.write_failure(from_exception(MemoryError("no more"), rank=1))
    result = settled(run, FAILED)
    assert (result.kind, result.rank, result.scheduler["state"]) == (OutcomeKind.OOM, 1, "FAILED")


def test_a_bare_exit_or_an_echo_says_less_than_the_scheduler(jobs, settled):
    run = begun(jobs)
    run.write_failure(from_exit(-6, rank=0))
    run.write_failure(from_exception(ConnectionError("Connection closed by peer"), rank=1))
    memory = JobState(state="ended", raw="OUT_OF_MEMORY", exit_code=0, job_id="12_0")
    assert settled(run, memory).kind is OutcomeKind.OOM


def test_a_wish_that_came_too_late_is_the_reason(jobs, settled):
    run = begun(jobs)
    write_stop(run.attempt_folder(1), StopReason(kind=OutcomeKind.PREEMPTED, cause="job 12_0 is preempted (SIGTERM)"))
    result = settled(run, JobState(state="ended", raw="FAILED", exit_code=-9, job_id="12_0"))
    assert (result.kind, result.cause) == (
        OutcomeKind.PREEMPTED,
        "job 12_0 is preempted (SIGTERM); it ended before it had saved",
    )


LOG = """\
slurmstepd-n1: error: *** STEP 12.0 ON n1 CANCELLED AT 2026-11-22T15:26:06 ***
slurmstepd-n1: error: StepId=12.0 exceeded memory limit (1176580096 > 1073741824), being killed
slurmstepd-n1: error: Exceeded job memory limit
srun: error: n1: task 0: Killed
"""
SAID = "Slurm says: StepId=12.0 exceeded memory limit (1176580096 > 1073741824), being killed"


@pytest.mark.parametrize(
    ("raw", "cause"),
    [
        ("FAILED", f"killed for want of memory; {SAID}"),
        ("OUT_OF_MEMORY", f"the job used more memory than it was given; {SAID}"),
    ],
)
def test_slurms_own_sentence_and_rank_stand_in_the_end_of_a_job_that_it_killed_for_memory(jobs, settled, raw, cause):
    run = begun(jobs)
    jobs.sweep.jobs.mkdir()
    (jobs.sweep.jobs / "7_0_0_log.err").write_text(LOG)
    result = settled(run, JobState(state="ended", raw=raw, exit_code=-9, job_id="7_0"))
    assert (result.kind, result.rank, result.cause) == (OutcomeKind.OOM, 0, cause)


def test_slurms_sentence_replaces_what_the_other_ranks_could_only_guess(jobs, settled):
    run = begun(jobs)
    jobs.sweep.jobs.mkdir()
    (jobs.sweep.jobs / "7_0_0_log.err").write_text(LOG.replace("task 0: Killed", "tasks 0-1: Killed"))
    lost = from_exception(ConnectionError("Connection closed by peer"), rank=1)
    run.write_result(replace(lost, attempt=1, step=3))
    result = settled(run, JobState(state="ended", raw="FAILED", exit_code=9, job_id="7_0"))
    assert (result.kind, result.rank, result.traceback, result.echo) == (OutcomeKind.OOM, None, None, False)
    assert result.cause == f"killed for want of memory; {SAID}"


@pytest.mark.parametrize(("asked", "kind"), [(True, OutcomeKind.CANCELLED), (False, OutcomeKind.PREEMPTED)])
def test_a_requeued_job_that_is_cancelled_before_its_next_attempt(jobs, settled, asked, kind):
    """SIGINT ends Python itself while it starts: the job has exit code 2 or 130, and no second attempt."""
    run = begun(jobs)
    run.write_result(Outcome(kind=OutcomeKind.PREEMPTED, cause="job 7_0 is preempted (SIGTERM)", attempt=1, step=3))
    if asked:
        run.ask_to_cancel()
    result = settled(run, JobState(state="ended", raw="FAILED", exit_code=2, nodes=("n1",), job_id="7_0"))
    assert (result.kind, result.step, result.attempt) == (kind, 3, 1)
    assert result.cause.endswith(" before it went on" if asked else "is preempted (SIGTERM)")


def test_a_node_that_cannot_write_the_logs_of_a_job(jobs, settled):
    """What sacct says, `FAILED|0:53`, of a job whose folder the node does not have."""
    run = jobs.run(1, launcher="slurm")
    result = settled(run, JobState(state="ended", raw="FAILED", exit_code=-53, nodes=("n1",), job_id="7_0"))
    assert (result.kind, result.attempt, result.exit_code) == (OutcomeKind.CRASH, 0, -53)
    told = "Slurm could not write the job's logs on its node (signal 53): do the nodes share the folder of runs?"
    assert result.cause == told


def test_the_scheduler_may_disagree_and_is_kept_beside(jobs, settled):
    run = begun(jobs)
    run.write_result(Outcome(kind=OutcomeKind.DONE, step=10, steps=10))
    result = settled(run, FAILED)
    assert (result.kind, result.step) == (OutcomeKind.DONE, 10)
    assert result.scheduler == {"job_id": "12_0", "state": "FAILED", "exit_code": 1}
    # Once is enough.
    before = (run.path / "result.json").stat().st_mtime_ns
    settled(run, FAILED)
    assert (run.path / "result.json").stat().st_mtime_ns == before


def test_ranks_that_were_told_to_stop_may_not_know_that_a_node_failed(jobs, settled):
    run = begun(jobs)
    run.write_result(Outcome(kind=OutcomeKind.PREEMPTED, step=3, steps=10, cause="a node of job 12_0 failed (SIGTERM)"))
    result = settled(run, JobState(state="ended", raw="NODE_FAIL", exit_code=0, job_id="12_0"))
    assert (result.kind, result.step, result.scheduler["state"]) == (OutcomeKind.NODE_FAIL, 3, "NODE_FAIL")


@pytest.mark.parametrize(
    ("raw", "kind", "cause"),
    [
        ("OUT_OF_MEMORY", "oom", "the job used more memory than it was given"),
        ("NODE_FAIL", "node_fail", "a node of the job failed"),
        ("FAILED", "crash", "ended with exit code 1 and left no result; its log says more"),
    ],
)
def test_the_schedulers_word_wins_over_a_bare_exit_that_a_watcher_wrote_first(jobs, settled, raw, kind, cause):
    run = begun(jobs)
    run.write_result(replace(from_exit(1, rank=1, step=3), steps=10))
    result = settled(run, JobState(state="ended", raw=raw, exit_code=1, job_id="12_0"))
    assert (result.kind.value, result.cause, result.rank, result.step) == (kind, cause, 1, 3)
    assert run.result(1) == result
    assert run.status().outcome == kind


def test_what_a_rank_has_said_of_a_crash_stands(jobs, settled):
    run = begun(jobs)
    try:
        raise LookupError("no such thing")
    except LookupError as error:
        run.write_result(from_exception(error, rank=0))
    result = settled(run, JobState(state="ended", raw="OUT_OF_MEMORY", exit_code=1, job_id="12_0"))
    assert (result.kind, result.scheduler["state"]) == (OutcomeKind.CRASH, "OUT_OF_MEMORY")


@pytest.mark.parametrize("code", [None, 1])
def test_one_that_was_cancelled_before_it_could_hear_is_cancelled(jobs, settled, code):
    run = jobs.run(1, launcher="local")
    run.ask_to_cancel()
    result = settled(run, JobState(state="ended", raw="running", exit_code=code, job_id="aa"))
    assert (result.kind, result.attempt, run.attempts()) == (OutcomeKind.CANCELLED, 0, [])
    assert result.cause.startswith("titanlab cancel on ")


def test_what_an_earlier_job_came_to_stands(jobs, settled):
    run = begun(jobs)
    run.write_result(Outcome(kind=OutcomeKind.HANG, ended=time.time() - 60))
    jobs.submit(run, 1, launcher="slurm")
    assert settled(run, JobState(state="ended", raw="CANCELLED", exit_code=0)).kind is OutcomeKind.HANG


DIED = JobState(state="ended", raw="FAILED", exit_code=1, elapsed_seconds=1.0, nodes=("n1",), job_id="7_0")
ENDED = JobState(state="ended", raw="ended", elapsed_seconds=1.0, nodes=("here",), job_id="7")
PRINTED = "ended before the run began: ImportError: no x"


def print_error(jobs, run):
    """The latest job of a run prints an error, as a process that cannot import a module does."""
    job, index = jobs.job_of(run)
    path = jobs.sweep.jobs / f"{job.job_id}_{index}_0_log.err"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("ImportError: no x\n")


@pytest.mark.parametrize(
    ("state", "code"),
    # The second is not a recipe that breaks a rule: Slurm's code of a program that does not exist.
    [(DIED, 1), (replace(DIED, exit_code=2), 2)],
)
def test_a_job_that_dies_before_its_run_begins_fails_with_what_it_has_printed(jobs, settled, state, code):
    run = jobs.run(1, launcher="slurm")
    print_error(jobs, run)
    result = settled(run, state)
    assert (result.kind, result.cause, result.attempt) == (OutcomeKind.CRASH, PRINTED, 0)
    assert (result.exit_code, run.status().state) == (code, "ended")


def test_a_retry_that_dies_before_its_run_begins_replaces_the_earlier_end(jobs, settled):
    run, state = jobs.run(1, launcher="slurm"), DIED
    begin(jobs, run)
    run.write_result(Outcome(kind=OutcomeKind.HANG, step=3, steps=10, ended=time.time() - 60, metrics={"loss": 2.5}))
    jobs.submit(run, 1, launcher="slurm")
    # What nobody has printed anything of may have been ended by others.
    assert settled(run, state).kind is OutcomeKind.HANG
    print_error(jobs, run)
    result = settled(run, state)
    assert (result.kind, result.cause, result.attempt) == (OutcomeKind.CRASH, PRINTED, 0)
    assert (result.step, result.steps, result.metrics) == (3, 10, {"loss": 2.5})
    assert run.result(1).kind is OutcomeKind.HANG
    # Once is enough.
    before = (run.path / "result.json").stat().st_mtime_ns
    settled(run, state)
    assert (run.path / "result.json").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("kind", "state"),
    [
        (OutcomeKind.DONE, DIED),
        # It had nothing to do: another job works on the run.
        (OutcomeKind.HANG, replace(DIED, raw="COMPLETED", exit_code=0)),
        (OutcomeKind.HANG, replace(DIED, raw="CANCELLED", exit_code=1)),
        (OutcomeKind.HANG, replace(DIED, exit_code=-15)),
        (OutcomeKind.HANG, replace(DIED, elapsed_seconds=0.0, nodes=())),
    ],
)
def test_a_job_that_has_not_failed_by_itself_leaves_the_earlier_end(jobs, settled, kind, state):
    run = begun(jobs)
    run.write_result(Outcome(kind=kind, ended=time.time() - 60))
    jobs.submit(run, 1, launcher="slurm")
    print_error(jobs, run)
    assert settled(run, state).kind is kind


def test_a_result_of_the_job_itself_stays_if_the_clock_of_its_host_is_behind(jobs, settled):
    run = jobs.run(1, launcher="local")
    begin(jobs, run)
    print_error(jobs, run)
    run.write_result(Outcome(kind=OutcomeKind.HANG, ended=time.time() - 60))
    before = (run.path / "result.json").stat().st_mtime_ns
    assert settled(run, ENDED).kind is OutcomeKind.HANG
    assert (run.path / "result.json").stat().st_mtime_ns == before


def test_a_run_in_somebodys_hands_is_left_alone(jobs, settled):
    run = begun(jobs)
    with run.claim():
        assert settled(run, FAILED) is None


def test_one_that_is_retried_has_the_newest_jobs_end(jobs, settled):
    run = begun(jobs)
    run.write_result(Outcome(kind=OutcomeKind.HANG))
    jobs.submit(run, 1, launcher="slurm")
    begin(jobs, run)
    result = settled(run, FAILED)
    assert (result.kind, result.attempt) == (OutcomeKind.CRASH, 2)
    assert run.result(1).kind is OutcomeKind.HANG


def test_a_run_that_no_job_has_begun_gets_a_result_too(tmp_path):
    """One of `titanlab train`, all of whose processes were killed."""
    run = tiny.begin(tiny.recipe(tmp_path))
    run.write_status(Status(state="running", step=3, steps=10, attempt=1, pid=2**22 + 1, updated=time.time() - 60))
    assert reconcile(SweepFolder(run.path.parent)) == {}
    assert (run.result().kind, run.result().step) == (OutcomeKind.CRASH, 3)
