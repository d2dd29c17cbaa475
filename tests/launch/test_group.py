"""The ranks of a job start again in place, all of them or without one."""

import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

from tests import tiny
from tests.sweep.jobs import Jobs, ended
from titanlab.distributed import ALONE
from titanlab.errors import ConfigError
from titanlab.launch import group as rendezvous
from titanlab.launch import write_submission
from titanlab.launch.group import RankGroup, Rendezvous, ranks_in
from titanlab.launch.launchers_schema import Local
from titanlab.records import Outcome, OutcomeKind


@pytest.fixture
def jobs(tmp_path):
    made = Jobs(tmp_path)
    yield made
    made.close()


def started(jobs, world, launch, **given):
    """The run, exit codes and output of a job of several ranks."""
    run = jobs.run(world, steps=6, every=2, **given)
    submission, _ = jobs.job_of(run)
    write_submission(jobs.sweep.path, replace(submission, launch=asdict(launch)))
    codes, said = ended(jobs.start(run, world))
    return run, codes, said


def record(run, attempt):
    return json.loads((run.attempt_folder(attempt) / "restart.json").read_text())


def test_members_are_numbered_anew_and_keep_their_devices():
    third = replace(ALONE, rank=2, world=4, local_rank=2, local_world=4)
    met = ranks_in(third, Rendezvous(start="", address="n1", port=7, members=(0, 2, 3)))
    assert (met.rank, met.world, met.local_rank, met.local_world) == (1, 3, 2, 4)
    assert ranks_in(third, Rendezvous(start="", port=7)).rank == 2


class _Stub:
    """A job of which only the ranks and the signals matter."""

    def __init__(self, run, world):
        self.run, self.signals = run, []
        self.place = SimpleNamespace(launcher="local", ranks=SimpleNamespace(world=world, local_world=world))

    def round(self, number):
        return f"job #{number}"


def test_rank_0_decides_and_tells_the_others(tmp_path):
    recipe = replace(tiny.recipe(tmp_path, shard=4), launch=Local(restarts=5, min_world=1))
    run = tiny.begin(recipe)
    job, said = _Stub(run, 4), []
    group = RankGroup(job, said.append)

    def dies(rank):
        outcome = Outcome(kind=OutcomeKind.CRASH, attempt=1, step=3, rank=rank)
        return group.goes_on_after(outcome, recipe if group.round < 2 else group._restart.recipe)

    assert dies(2)
    assert (group.round, group.members) == (1, ())
    assert dies(2)
    # Numbers of the job's ranks; three processes are left, and three divide the 12 sequences of a step.
    assert (group.round, group.members, group.config()["world"]) == (2, (0, 1, 3), 3)
    assert "rank 2 has failed twice and is left out: dp_s4 becomes dp_s3" in said[-1]
    assert rendezvous.find_meeting(run, "job #3") is None
    job.signals.append((15, 0.0))
    assert not dies(1)
    assert rendezvous.find_meeting(run, "job #3").reason == "has ended"


def test_a_job_does_not_train_another_recipe_under_the_name_of_its_run(tmp_path):
    """Somebody edited config.yaml while the run waited in the queue."""
    run = tiny.begin(tiny.recipe(tmp_path))
    file = run.path / "config.yaml"
    file.write_text(file.read_text().replace("  lr: 0.001\n", "  lr: 0.1\n"))
    with pytest.raises(ConfigError, match=r"^optimizer.lr=0.1: the run was made with 0.001, by its identity.json"):
        RankGroup(_Stub(run, 1), print).recipe()


@pytest.mark.full
def test_a_rank_of_a_job_that_is_killed_comes_back(jobs):
    run, codes, said = started(jobs, 2, Local(restarts=2, threads=1), fault="kill", step=4, rank=1, attempt=1)
    assert codes == [0, 0], said
    assert (run.result().kind, run.result().step, run.attempts()) == (OutcomeKind.DONE, 6, [1, 2])
    assert [row["step"] for row in run.metrics("attempt")] == [0, 2]
    assert "attempt 1 ended as crash after step 3, rank 1 (killed by SIGKILL" in record(run, 2)["why"]
    assert "restart 1 of 2 from step 2" in said
    # Both attempts are of one job.
    assert run.job(1)["token"] == run.job(2)["token"]


@pytest.mark.full
def test_a_rank_of_a_job_that_fails_twice_is_left_out(jobs):
    launch = Local(restarts=4, min_world=1, threads=1)
    run, codes, said = started(jobs, 3, launch, fault="kill", step=4, rank=2)
    assert codes == [0, 0, 0], said
    assert (run.result().kind, run.attempts()) == (OutcomeKind.DONE, [1, 2, 3])
    assert (record(run, 3)["left_out"], record(run, 3)["world"]) == (2, 2)
    assert "this rank is left out of attempt 3" in said
    assert run.config(3)["parallelism"]["replicate"] == 2


@pytest.mark.full
def test_restarts_that_gain_nothing_end_the_job_with_its_cause(jobs):
    run, codes, said = started(jobs, 2, Local(restarts=9, threads=1), fault="raise", step=4, rank=1)
    assert codes == [1, 1], said
    assert (run.result().kind, run.attempts()) == (OutcomeKind.CRASH, [1, 2, 3])
    assert run.result().cause == "LookupError: a planted fault"
    assert "not restarted: 2 restarts in a row have reached no further step and saved no checkpoint" in said
