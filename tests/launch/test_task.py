"""The processes of a job, for real: they train, are told to stop, go on, and every end of theirs is a result."""

import json
import re
import signal
import time
from dataclasses import asdict, dataclass, replace

import pytest

from tests import tiny
from tests.launch.slurm.printed import submission
from tests.sweep.jobs import Jobs, ended, send
from tests.until import until
from titanlab.distributed import ALONE
from titanlab.launch import LaunchConfig, Launcher, execute, launcher_named, task, write_submission
from titanlab.launch import job as rendezvous
from titanlab.launch.contract import ProcessPlace
from titanlab.launch.execute import Attempts
from titanlab.launch.job import Job
from titanlab.launch.launchers_schema import Local
from titanlab.launch.slurm.launcher import SlurmLauncher
from titanlab.records import Outcome, OutcomeKind

# Until ranks have begun to train, on a busy machine.
START_SECONDS = 200.0


@pytest.fixture
def jobs(tmp_path):
    made = Jobs(tmp_path)
    yield made
    made.close()


def rows(run):
    return [(row["step"], row["loss_metrics/global_avg_loss"], row["grad_norm"]) for row in run.metrics("train")]


@pytest.mark.full
def test_a_preempted_job_goes_on_and_its_losses_are_those_of_an_undisturbed_run(jobs):
    undisturbed = jobs.run(2, steps=12, name="undisturbed")
    assert ended(jobs.start(undisturbed, 2))[0] == [0, 0]
    run = jobs.run(2, steps=12, seconds=0.1)
    ranks = jobs.start(run, 2)
    until(lambda: len(run.metrics("train")) >= 3, START_SECONDS)
    assert run.is_claimed()
    send(ranks, signal.SIGUSR2)
    codes, said = ended(ranks)
    assert codes == [75, 75], said
    job = run.job()
    assert (job["launcher"], job["token"], job["index"], job["restart_count"]) == (
        "nohup",
        jobs.job_of(run)[0].token,
        0,
        0,
    )
    first = run.result()
    assert (first.kind, first.cause) == (OutcomeKind.PREEMPTED, "asked to end by SIGUSR2; the run can be resumed")
    assert 3 <= first.step < 12
    assert ended(jobs.start(run, 2))[0] == [0, 0]
    assert (run.result().kind, run.attempts()) == (OutcomeKind.DONE, [1, 2])
    assert [row["step"] for row in run.metrics("attempt")] == [0, first.step]
    assert rows(run) == rows(undisturbed)


@pytest.mark.full
def test_a_job_of_this_host_goes_on_after_a_signal_and_a_lost_rank(jobs):
    run = jobs.run(2, launcher="local", steps=40, seconds=0.1, fault="kill", step=9, rank=1)
    submission, _ = jobs.job_of(run)
    write_submission(jobs.sweep.path, replace(submission, launch=asdict(Local(restarts=1))))
    first = jobs.start(run, 1)
    until(lambda: len(run.metrics("train")) >= 3, START_SECONDS)
    send(first, signal.SIGTERM)
    assert ended(first)[0] == [75]
    assert (run.result().kind, run.result().step < 9) == (OutcomeKind.PREEMPTED, True)
    codes, said = ended(jobs.start(run, 1))
    # The fault is planted again: one restart is allowed.
    assert (codes, run.result().kind, run.result().rank) == ([1], OutcomeKind.CRASH, 1), said
    assert (run.attempts(), run.restarts()) == ([1, 2, 3], 1)


# In `make test`: what Ctrl-C saves in test_ranks.py, and who has asked in test_reconcile.py.
@pytest.mark.full
@pytest.mark.parametrize("launcher", ["nohup", pytest.param("local", marks=pytest.mark.covering)])
def test_one_that_is_cancelled_saves_and_says_who_asked(jobs, launcher):
    run = jobs.run(1, launcher=launcher, steps=2000, seconds=0.05)
    ranks = jobs.start(run, 1)
    until(lambda: len(run.metrics("train")) >= 2, START_SECONDS)
    run.ask_to_cancel()
    if launcher == "local":
        launcher_named(launcher).cancel(jobs.sweep.path, [jobs.job_of(run)], print, is_gentle=True)
    codes, said = ended(ranks)
    result = run.result()
    assert (codes, result.kind) == ([130], OutcomeKind.CANCELLED), said
    assert re.fullmatch(r"titanlab cancel on \S+; the run can be resumed", result.cause)
    assert run.checkpoints.joinpath(f"step-{result.step:08d}", "index.json").exists()


@pytest.mark.full
def test_a_rank_that_is_stopped_is_named_and_not_the_one_that_waits(jobs):
    rank = 0
    run = jobs.run(2, steps=60, fault="SIGSTOP", step=6, rank=rank, step_timeout_seconds=5.0)
    codes, said = ended(jobs.start(run, 2))
    result = run.result()
    assert codes == [71, 71], said
    assert (result.kind, result.rank, result.traceback) == (OutcomeKind.HANG, rank, None)
    reason = f"rank {rank} does not answer: its process is stopped (SIGSTOP); rank {1 - rank} waits in "
    assert result.cause.startswith(f"step 6 did not end within 5 s: {reason}")


# What the log of such a rank says is read in test_watch.py.
@pytest.mark.full
@pytest.mark.parametrize("launcher", [pytest.param("nohup", marks=pytest.mark.covering), "local"])
@pytest.mark.parametrize("gibibytes", [0.7, 1.5], ids=["at the import of torch", "in a step"])
def test_one_without_memory(jobs, gibibytes, launcher):
    run = jobs.run(1, launcher=launcher, steps=4, fault="memory", step=3)
    codes, said = ended(jobs.start(run, 1, preamble=f"ulimit -v {int(gibibytes * 2**20)}", OMP_NUM_THREADS="1"))
    result = run.result()
    assert (codes, result.kind, result.rank) == ([70], OutcomeKind.OOM, 0), said


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_job_of_this_host_in_other_hands_or_cancelled_begins_nothing(jobs, capsys, is_asked):
    run = jobs.run(2, launcher="local", steps=3)
    command = [str(jobs.sweep.path), jobs.job_of(run)[0].token, "0"]
    if is_asked:
        run.ask_to_cancel()
        assert (task.main(command), run.result().kind, run.result().attempt) == (130, OutcomeKind.CANCELLED, 0)
    else:
        with run.claim():
            assert (task.main(command), run.result()) == (0, None)
        assert capsys.readouterr().out.count("nothing is done twice") == 1
    assert run.attempts() == []


def ranks_of(run, *, launcher, world):
    """The same job as each of its ranks sees it."""
    return [
        Job(run=run, place=ProcessPlace(launcher=launcher, job_id="12", raw_job_id="12", ranks=ranks, nodes=("n1",)), submission=submission(), index=0)
        for ranks in (replace(ALONE, rank=rank, world=world) for rank in range(world))
    ]  # fmt: skip


def test_what_is_refused_at_the_start_is_a_result_too(jobs):
    run = jobs.run(2, steps=3)
    tiny.write_checkpoint(run.checkpoints / "step-00000001", {"step": 1, "parameters": {}})
    codes, said = ended(jobs.start(run, 2))
    result = run.result()
    assert (codes, result.kind, run.attempts()) == ([2, 2], OutcomeKind.INFEASIBLE, [1]), said
    assert "is of another model" in result.cause


def test_edited_code_trains_nothing(jobs):
    run = jobs.run(2, launcher="local", steps=3)
    (jobs.sweep.path / "code").unlink()
    (jobs.sweep.path / "code" / "titanlab").mkdir(parents=True)
    codes, said = ended(jobs.start(run, 1))
    result = run.result()
    assert (codes, result.kind, run.attempts()) == ([2], OutcomeKind.INFEASIBLE, [1]), said
    assert "is not the code of this job, " in result.cause
    assert "PYTHONPATH was lost or changed on the way to its processes; have launch.container and" in result.cause
    assert run.metrics("train") == []


@pytest.mark.parametrize(("restart", "index", "code", "asked"), [(1, 0, 73, True), (0, 0, 0, False), (1, 1, 0, False)])
def test_one_that_was_put_back_and_whose_dead_start_holds_the_run_goes_back_again(
    jobs, monkeypatch, restart, index, code, asked
):
    run = jobs.run(1, launcher="slurm", steps=3)
    attempt = run.begin_attempt(run.config(), {})
    token = jobs.sweep.submissions()[0].token
    (run.attempt_folder(attempt) / "job.json").write_text(json.dumps({"token": token, "index": index}))
    for name in ("CLAIM_SECONDS", "CLAIM_AGAIN_SECONDS", "CLAIM_DEAD_SECONDS"):
        monkeypatch.setattr(task, name, 0.1)
    put_back = []
    monkeypatch.setattr(SlurmLauncher, "requeue", lambda self, place: put_back.append(place.restart))
    place = ProcessPlace(
        launcher="slurm", job_id="12", raw_job_id="12", restart=restart, index=None, ranks=ALONE, nodes=("n1",)
    )
    launch = {"requeue": True, "max_requeues": 20}
    submitted = replace(submission(token), launch=launch)
    job = Job(run=run, place=place, submission=submitted, index=0)
    with run.claim():
        assert task._lead(job) == code
        assert put_back == ([1] if asked else [])
        assert rendezvous.find_meeting(run, job.start).reason
        # Not without end, and not against a wish.
        assert task._lead(replace(job, submission=replace(submitted, launch={**launch, "max_requeues": 1}))) == code
        assert task._lead(replace(job, signals=[(2, 0.0)])) == code
    assert put_back == ([1] if asked else [])


def test_one_that_is_told_to_end_waits_no_longer_for_its_run(jobs, monkeypatch):
    run = jobs.run(1, launcher="slurm", steps=3)
    (job,) = ranks_of(run, launcher="slurm", world=1)
    monkeypatch.setattr(task, "CLAIM_SECONDS", 300.0)
    begin = time.monotonic()
    with run.claim():
        assert task._lead(replace(job, signals=[(15, 0.0)])) == 0
    assert time.monotonic() - begin < 60


def test_the_others_are_told_that_a_run_is_done(jobs, capsys):
    run = jobs.run(2, launcher="slurm", steps=3)
    first, second = ranks_of(run, launcher="slurm", world=2)
    run.write_result(Outcome(kind=OutcomeKind.DONE, attempt=1, steps=3))
    assert (task._lead(first), task._follow(second)) == (0, 0)
    # For one that is told before it finds the result.
    assert rendezvous.find_meeting(run, second.start).reason == "is done"
    assert run.attempts() == [1]
    assert capsys.readouterr().out.count("is done: 3 steps") == 2


@dataclass(kw_only=True)
class Elsewhere(LaunchConfig):
    """The config of another package's launcher, whose jobs get nodes."""

    kind: str = "elsewhere"

    def implementation(self):
        return Launcher()


@dataclass(kw_only=True)
class Here(Elsewhere):
    """The config of another package's launcher, whose jobs run on this host."""

    @property
    def runs_here(self):
        return True


@pytest.mark.parametrize(("config", "hosts"), [(Elsewhere(), ["n1"]), (Here(), []), (Local(), [])])
def test_a_host_is_remembered_unless_all_jobs_run_on_it(tmp_path, monkeypatch, config, hosts):
    remembered = []
    monkeypatch.setattr(execute, "default_config", {config.kind: config}.__getitem__)
    monkeypatch.setattr(execute, "note_bad_host", lambda run, outcome, host: remembered.append(host))
    place = ProcessPlace(launcher=config.kind, job_id="1", raw_job_id="1", ranks=ALONE, nodes=("n1",))
    job = Job(run=tiny.begin(tiny.recipe(tmp_path)), place=place, submission=submission(), index=0)
    Attempts(job.run, None, job=job).remember_host(Outcome(kind=OutcomeKind.HANG))
    assert remembered == hosts
